"""The time that serving over HTTP adds to a token, compared with ``LLM.generate``.

Run from the repository root:

    .venv/bin/python -m bench.http_cost [--streams 64] [--repeats 5] [--output FILE] [-- FLAGS]

Both engines run in processes of their own, in turns, on the same prompts; FLAGS go to `jaxinfer
serve`. The added time is the difference of the two wall times over all tokens, client included: if
client and server share the cores, it includes the client's part. CPU times are reported as well,
because wall times vary on a machine that runs other jobs: those of the client, of the server's own
process, and the whole server's minus the offline engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.peer_process import PeerProcess
from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Client
from jaxinfer.bench.offer import Outcome, offer
from jaxinfer.bench.process_tree import tree_cpu
from jaxinfer.bench.serve import first_model
from jaxinfer.bench.server_process import ServerProcess
from jaxinfer.bench.workload import Query, RandomLengths, body_of, random_queries
from jaxinfer.core.config import DEFAULT_MODEL

ROUTE = "/v1/completions"
PEER = Path(__file__).parent / "peers" / "jaxinfer_peer.py"
FIELDS = {"ignore_eos": True, "temperature": 0}


async def ask(url: str, queries: list[Query]) -> Outcome:
    """All queries at once, streamed. Raises ``RuntimeError`` if one fails."""
    client = Client(url)
    model = await first_model(client, 60)
    bodies = [body_of(query, ROUTE, model, FIELDS) for query in queries]
    outcome = await offer(client, ROUTE, bodies, [0.0] * len(bodies))
    client.close()
    for answer, query in zip(outcome.answers, queries, strict=True):
        if answer.error or answer.output_tokens != query.max_tokens:
            raise RuntimeError(answer.error or f"an answer has {answer.output_tokens} tokens")
    return outcome


def compare(
    server: ServerProcess, offline: PeerProcess, queries: list[Query], repeats: int
) -> dict[str, Any]:
    """Wall seconds of both sides, in turns, after one untimed run of each."""
    prompts = [query.prompt for query in queries if isinstance(query.prompt, list)]
    max_tokens = queries[0].max_tokens
    rows: list[dict[str, float]] = []
    tokens = len(queries) * max_tokens
    for _ in range(repeats + 1):
        served_before, offline_before = tree_cpu(server.pid), tree_cpu(offline.pid)
        outcome = asyncio.run(ask(server.url, queries))
        seconds = offline.run(prompts, max_tokens).seconds
        served_after, offline_after = tree_cpu(server.pid), tree_cpu(offline.pid)
        front_cpu = served_after.own - served_before.own
        served_cpu = served_after.tree - served_before.tree
        offline_cpu = offline_after.tree - offline_before.tree
        rows.append(
            {
                "served_s": outcome.seconds,
                "offline_s": seconds,
                "added_ms_per_token": 1e3 * (outcome.seconds - seconds) / tokens,
                "client_cpu_ms_per_token": 1e3 * outcome.cpu_seconds / tokens,
                "front_cpu_ms_per_token": 1e3 * front_cpu / tokens,
                "added_cpu_ms_per_token": 1e3 * (served_cpu - offline_cpu) / tokens,
                "load": os.getloadavg()[0],
            }
        )
    del rows[0]
    return {**{name: median(row[name] for row in rows) for name in rows[0]}, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/http_cost.json"))
    parser.add_argument("--llm", type=json.loads, default={}, help="JSON of the LLM's arguments")
    parser.add_argument("flags", nargs="*", help="after --: flags of jaxinfer serve")
    given = parser.parse_args(argv)
    lengths = RandomLengths(input_len=given.input_len, output_len=given.output_len)
    queries = random_queries(lengths, range(1000, given.vocab_size), given.streams, seed=42)
    flags = [given.model, "--no-enable-prefix-caching", *given.flags]
    with (
        PeerProcess(sys.executable, PEER, given.model, json.dumps(given.llm)) as offline,
        ServerProcess(*flags) as server,
    ):
        result = compare(server, offline, queries, given.repeats)
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:24} {value:10.4f}")
    report = {**host_circumstances(), "streams": given.streams, "flags": flags, **result}
    write_report(given.output, report)


if __name__ == "__main__":
    main()
