"""Compares the first requests after a start with later ones: is a ready server fully warmed up?

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``:

    .venv/bin/python -m bench.first_requests --starts 2 [--output FILE] -- MODEL --cache-dir FOLDER

Each start sends the first 20 requests one after the other, of every kind, then each kind again for
its steady time. With an empty cache folder the first start compiles everything. Exits with 1 if a
first request took longer than 1.5 times its steady time plus 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Client
from jaxinfer.bench.server_process import ServerProcess

FIRST_REQUESTS = 20
REPEATS = 5  # of each kind, for its steady time
MAX_RATIO, MAX_EXTRA_SECONDS = 1.5, 0.05
WORDS = "the river bends east past the old mill and the road goes on to the town "

type Kind = tuple[str, str, dict[str, Any]]

ONE_TOKEN: Kind = ("first", "/v1/completions", {"prompt": WORDS, "max_tokens": 1, "temperature": 0})


def kinds() -> list[Kind]:
    """Name, route and body of each kind of request; 32 tokens each, so that steps are timed."""
    plain = {"prompt": WORDS * 4, "max_tokens": 32, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 32, "ignore_eos": True}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    return [
        ("plain", completions, plain),
        ("chat", chats, chat),
        ("logprobs", completions, {**plain, "logprobs": 2}),
        ("penalties", completions, {**plain, "presence_penalty": 0.5, "repetition_penalty": 1.1}),
        ("n", completions, {**plain, "n": 4}),
        ("long prompt", completions, {**plain, "prompt": WORDS * 60}),
        ("chat logprobs", chats, {**chat, "logprobs": True, "top_logprobs": 5}),
        ("echo", completions, {**plain, "echo": True, "logprobs": 1}),
        ("bias", completions, {**plain, "logit_bias": {"7": 2}, "min_tokens": 8}),
        ("greedy", completions, {**plain, "temperature": 0}),
    ]


async def seconds_of(client: Client, kind: Kind) -> float:
    """The duration of one request; raises ``RuntimeError`` if it fails."""
    _, path, body = kind
    started = time.perf_counter()
    answer = await client.post(path, json.dumps(body).encode())
    if answer.status != 200 or answer.error:
        raise RuntimeError(f"{kind[0]}: {answer.status} {answer.error}")
    return time.perf_counter() - started


async def measure(url: str, started: float) -> dict[str, Any]:
    """The time of the first token since ``started``, then first and steady seconds of requests."""
    client, every = Client(url), kinds()
    await seconds_of(client, ONE_TOKEN)
    answered = time.perf_counter() - started
    order = [every[i % len(every)] for i in range(FIRST_REQUESTS)]
    first = [await seconds_of(client, kind) for kind in order]
    steady = {
        kind[0]: median([await seconds_of(client, kind) for _ in range(REPEATS)]) for kind in every
    }
    stats = json.loads((await client.get("/stats")).body)
    client.close()
    rows = [
        {"kind": kind[0], "first": seconds, "steady": steady[kind[0]]}
        for kind, seconds in zip(order, first, strict=True)
    ]
    return {
        "first_token_seconds": answered,
        "requests": rows,
        "late": [r for r in rows if r["first"] > MAX_RATIO * r["steady"] + MAX_EXTRA_SECONDS],
        "longest_first_seconds": max(first),
        "late_compiles": stats["late_compiles"],
    }


def start(arguments: list[str]) -> dict[str, Any]:
    """One start of a server: its times to ready and to the first token, and its first requests."""
    started = time.perf_counter()
    with ServerProcess(*arguments) as server:
        found = asyncio.run(measure(server.url, started))
    return {"ready_seconds": server.ready_seconds, **found}


def main() -> int:
    """Measure the starts, print a table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="+", help="model and flags of jaxinfer serve, after --")
    given = parser.parse_args()
    report: dict[str, Any] = {
        "serve": given.serve,
        **host_circumstances("jaxinfer", "pallas_kernels"),
    }
    report["starts"] = []
    for number in range(given.starts):
        found = start(given.serve)
        report["starts"].append(found)
        print(
            f"start {number}: ready {found['ready_seconds']:.2f} s, first token "
            f"{found['first_token_seconds']:.2f} s, longest of the first {FIRST_REQUESTS} "
            f"{found['longest_first_seconds']:.3f} s, late {len(found['late'])}",
            flush=True,
        )
        for row in found["requests"]:
            print(f"  {row['kind']:14} first {row['first']:.3f} s, steady {row['steady']:.3f} s")
        if given.output:
            write_report(given.output, report)
    return int(any(found["late"] for found in report["starts"]))


if __name__ == "__main__":
    raise SystemExit(main())
