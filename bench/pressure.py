r"""A server whose KV pool is full for a long time: nothing may leak, every request is answered.

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``, with which
the pool should be small:

    .venv/bin/python -m bench.pressure --seconds 1800 -- MODEL --num-pages 2000
    .venv/bin/python -m bench.pressure --seconds 600 --tiny --at-once 160 --longest 384 -- \
        --num-pages 769 --max-num-seqs 128 --max-model-len 512 --max-num-batched-tokens 256

So many requests are open at any time that pages run out and sequences are preempted; some clients
leave. The load has two halves; after each one the server has time to become idle, and what it holds
is counted: pages, memory, locked memory, open files, threads. Exits with 1 if it holds more after
the second half than after the first, up to ``MOST_GROWTH`` of its memory and ``MOST_MORE`` files
and threads, if a request was not answered, or if the pool was not full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.storm import Body, left_over, sent, told
from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Client
from jaxinfer.bench.numbers import percentile
from jaxinfer.bench.process_tree import tree_memory, tree_processes
from jaxinfer.bench.server_process import ServerProcess

MOST_GROWTH = 0.02  # of memory, from the idle server after the first half to that after the second
MOST_MORE = 4  # bytes of locked memory, files, threads or processes: pools of threads grow late
FULL = 0.97  # the share of live pages, in the median, of a pool that counts as full
SHARE_THAT_LEAVES = 0.05
SHARE_IN_COMMON = 0.3  # of the prompts: these share their beginnings
KIB = 1024
SAMPLES = 60  # of a report, at most
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def bodies(ids: random.Random, longest: int, vocab_size: int) -> Iterator[Body]:
    """Requests without end, whose prompts and answers have up to ``longest`` tokens together."""
    common = [ids.randrange(vocab_size) for _ in range(longest)]
    while True:
        total = ids.randint(longest // 8, longest)
        length = ids.randint(1, total - 1)
        start = ids.randint(0, length) if ids.random() < SHARE_IN_COMMON else 0
        prompt = common[:start] + [ids.randrange(vocab_size) for _ in range(length - start)]
        yield {
            "prompt": prompt,
            "max_tokens": total - length,
            "ignore_eos": True,
            "priority": ids.randrange(3),
            "seed": ids.randrange(1 << 30),
            "stream": ids.random() < 0.5,
        }


async def loaded(url: str, given: argparse.Namespace, ids: random.Random) -> Counter[str]:
    """Keep requests open until the half has passed; returns how they ended."""
    client, ended = Client(url), Counter[str]()
    until = time.monotonic() + given.seconds / 2
    left = bodies(ids, given.longest, given.vocab_size)

    async def worker() -> None:
        while time.monotonic() < until:
            patience = 3 * ids.random() if ids.random() < SHARE_THAT_LEAVES else None
            try:
                ended[told(await asyncio.wait_for(sent(client, next(left)), patience))] += 1
            except TimeoutError:
                ended["left"] += 1

    await asyncio.gather(*(worker() for _ in range(given.at_once)))
    client.close()
    return ended


async def watched(url: str, pid: int, seconds: float, samples: list[dict[str, float]]) -> None:
    """A sample of the server's pages and memory each ``seconds``, until it is cancelled."""
    client, start = Client(url), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        stats = json.loads((await client.get("/stats")).body)
        pages = stats["pages"]
        samples.append(
            {
                "seconds": round(time.monotonic() - start, 1),
                "share_live": round(pages["usage"], 4),
                "running": stats["requests"]["running"],
                "preemptions": stats["requests"]["preemptions"],
                "rss": tree_memory(pid).rss,
            }
        )


def held(pid: int) -> dict[str, int]:
    """The server's processes: bytes of memory and of locked memory, files, threads."""
    found = {"rss": 0, "pss": 0, "locked": 0, "files": 0, "threads": 0, "processes": 0}
    memory = tree_memory(pid)
    found |= {"rss": memory.rss, "pss": memory.pss}
    for each in tree_processes(pid):
        with suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text().splitlines()
            lines = dict(line.split(":", 1) for line in status)
            found["locked"] += KIB * sum(int(lines[n].split()[0]) for n in ("VmLck", "VmPin"))
            found["threads"] += int(lines["Threads"])
            found["files"] += len(list(Path(f"/proc/{each}/fd").iterdir()))
            found["processes"] += 1
    return found


async def measured(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both halves, and what is held after each."""
    ids, samples = random.Random(given.seed), list[dict[str, float]]()
    ended, after = Counter[str](), list[dict[str, float]]()
    for _ in range(2):
        watch = asyncio.create_task(watched(url, pid, given.interval, samples))
        ended += await loaded(url, given, ids)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        left = await left_over(url)
        await asyncio.sleep(given.rest)
        after.append({**held(pid), **left})
    return {"ended": ended, "after": after, "samples": samples}


def faults(found: dict[str, Any]) -> list[str]:
    """The faults, each in words."""
    first, second = found["after"]
    good = ("answered", "left")
    wrong = [f"{count} {what}" for what, count in found["ended"].items() if what not in good]
    wrong += [f"{name}: {second[name]:g}" for name in LEFT if second[name]]
    for name in ("rss", "pss"):
        if second[name] > (1 + MOST_GROWTH) * first[name]:
            wrong.append(f"{name} grew from {first[name]} to {second[name]}")
    for name in ("locked", "files", "threads", "processes"):
        if second[name] > first[name] + MOST_MORE:
            wrong.append(f"{name} grew from {first[name]} to {second[name]}")
    share = percentile([one["share_live"] for one in found["samples"]], 50)
    if share < FULL:
        wrong.append(f"the pool was not full: {share:.1%} in the median")
    return wrong


LEFT = ("late_compiles", "active", "running", "waiting", "live_pages")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--seconds", type=float, default=1800.0, help="of load, both halves")
    made.add_argument("--at-once", type=int, default=64, help="requests that are open")
    made.add_argument("--longest", type=int, default=512, help="tokens of prompt and answer")
    made.add_argument("--vocab-size", type=int, default=4096)
    made.add_argument("--interval", type=float, default=2.0, help="seconds between samples")
    made.add_argument("--rest", type=float, default=3.0, help="seconds before what is held counts")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--tiny", action="store_true", help="a tiny model with random weights")
    made.add_argument("--output", type=Path)
    made.add_argument("serve", nargs="*", help="model and flags of jaxinfer serve, after --")
    return made


def main() -> int:
    """Start a server, load it, print the result; 1 if something is wrong."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words: list[str] = given.serve
        if given.tiny:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(TINY))
            words = [str(path), "--load-format=dummy", "--skip-tokenizer-init", *words]
        with ServerProcess(*words) as server:
            found = asyncio.run(measured(server.url, server.pid, given))
    shares = [one["share_live"] for one in found["samples"]]
    report: dict[str, Any] = {
        **host_circumstances("jaxinfer", "pallas_kernels"),
        "serve": given.serve,
        "seconds": given.seconds,
        "at_once": given.at_once,
        "longest": given.longest,
        "share_of_pool": {f"p{p}": round(percentile(shares, p), 4) for p in (5, 50, 95)},
        "preemptions": found["samples"][-1]["preemptions"],
        "faults": faults(found),
        **found,
    }
    report["samples"] = found["samples"][:: 1 + len(shares) // SAMPLES]
    if given.output:
        write_report(given.output, report)
    del report["samples"]
    print(json.dumps(report, indent=1))
    return int(bool(report["faults"]))


if __name__ == "__main__":
    raise SystemExit(main())
