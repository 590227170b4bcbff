"""Steady load on a running server: a number of open streams; gaps, errors, memory.

Run from the repository root:

    .venv/bin/python -m bench.load --streams 64 --seconds 300 --server-pid PID [--output FILE]

Each stream starts its next request when the last one ends; prompts are texts of mixed length. Exits
with 1 if a limit is exceeded: no errors, p99 gap <= 4 x the median, memory constant within 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.numbers import percentile
from jaxinfer.bench.process_tree import tree_memory
from jaxinfer.bench.serve import first_model
from jaxinfer.bench.workload import Query, body_of

TEXTS = Path("tests/data/evals/hellaswag_200.jsonl.gz")
WINDOW = 60  # seconds at the start and at the end that are compared
MEMORY_PERIOD = 1.0  # seconds between two samples

# limits for a steady run
MAX_GAP_RATIO = 4.0
MAX_DRIFT_PERCENT = 5.0


@dataclass
class Load:
    """The record of a run; times are seconds from its start."""

    seconds: float
    warmup: float  # seconds in which nothing is counted
    answers: int = 0
    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # time, rss, pss

    def take(self, answer: Answer, start: float) -> None:
        """Count one answer, and those of its chunks that arrived after the warm-up."""
        self.answers += 1
        if answer.error:
            self.errors.append(answer.error)
        self.output_tokens += answer.output_tokens
        if not answer.times:
            return
        if answer.start - start >= self.warmup:
            self.ttfts.append(answer.ttft)
        for gap, when in zip(answer.gaps, answer.times[1:], strict=True):
            if when - start >= self.warmup:
                self.gaps.append(gap)
                self.chunk_times.append(when - start)

    def summary(self) -> dict[str, Any]:
        """Figures of the run; times in ms, memory in MB."""
        gaps = [1e3 * gap for gap in self.gaps]
        p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
        counted = [when for when in self.chunk_times if when <= self.seconds]
        return {
            "answers": self.answers,
            "errors": len(self.errors),
            "output_tokens": self.output_tokens,
            "output_throughput": len(counted) / (self.seconds - self.warmup),
            "gap_p50_ms": p50,
            "gap_p99_ms": p99,
            "gap_max_ms": max(gaps, default=0.0),
            "gap_ratio": p99 / p50 if p50 else None,
            "median_ttft_ms": 1e3 * median(self.ttfts or [0.0]),
            **self._memory_summary(),
        }

    def _memory_summary(self) -> dict[str, float]:
        """Median RSS of the first and of the last minute after the warm-up."""
        if not self.memory:
            return {}
        window = min(WINDOW, (self.seconds - self.warmup) / 2)
        rows = [row for row in self.memory if row[0] >= self.warmup]
        first = median(rss for when, rss, _ in rows if when <= self.warmup + window)
        last = median(rss for when, rss, _ in rows if when >= self.seconds - window)
        return {
            "rss_first_mb": first / 1e6,
            "rss_last_mb": last / 1e6,
            "rss_peak_mb": max(rss for _, rss, _ in self.memory) / 1e6,
            "pss_last_mb": self.memory[-1][2] / 1e6,
            "rss_drift_percent": 100 * (last / first - 1),
        }


def broken_bounds(summary: dict[str, Any]) -> list[str]:
    """One sentence for each limit that the run exceeded."""
    broken: list[str] = []
    if summary["errors"]:
        broken.append(f"{summary['errors']} of {summary['answers']} requests failed")
    if summary["gap_ratio"] is None or summary["gap_ratio"] > MAX_GAP_RATIO:
        broken.append(f"p99 gap / median is {summary['gap_ratio']}, above {MAX_GAP_RATIO}")
    if abs(summary.get("rss_drift_percent", 0.0)) > MAX_DRIFT_PERCENT:
        broken.append(f"memory moved by {summary['rss_drift_percent']:.1f} %")
    return broken


def mixed_queries(texts: list[str], seed: int) -> Iterator[Query]:
    """Prompts of one to eight texts, answers of 16 to 128 tokens, without end."""
    rng = random.Random(seed)
    while True:
        prompt = " ".join(rng.choices(texts, k=rng.randint(1, 8)))
        yield Query(prompt, rng.randint(16, 128))


def read_texts(path: Path) -> list[str]:
    """The contexts of HellaSwag's rows."""
    with gzip.open(path, "rt") as file:
        return [row["ctx_a"] for row in map(json.loads, file) if row["ctx_a"]]


async def keep_streams(
    client: Client,
    path: str,
    bodies: Iterator[bytes],
    *,
    streams: int,
    seconds: float,
    warmup: float,
    server_pid: int | None = None,
) -> Load:
    """Keep ``streams`` requests open for ``seconds``, then wait for the last ones to end."""
    load = Load(seconds, warmup)
    start = time.perf_counter()

    async def stream() -> None:
        while time.perf_counter() - start < seconds:
            answer = await client.post(path, next(bodies))
            load.take(answer, start)
            if answer.error:
                await asyncio.sleep(0.1)  # no tight loop if the server is down

    async def watch(pid: int) -> None:
        while True:
            rss, pss, _ = await asyncio.to_thread(tree_memory, pid)
            load.memory.append((time.perf_counter() - start, rss, pss))
            await asyncio.sleep(MEMORY_PERIOD)

    watcher = asyncio.create_task(watch(server_pid)) if server_pid else None
    await asyncio.gather(*(stream() for _ in range(streams)))
    if watcher:
        watcher.cancel()
    return load


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the server and report."""
    client = Client(arguments.base_url)
    model = arguments.model or await first_model(client, 60)
    extra = {"ignore_eos": True, "temperature": arguments.temperature}
    queries = mixed_queries(read_texts(arguments.texts), arguments.seed)
    load = await keep_streams(
        client,
        arguments.endpoint,
        (body_of(query, arguments.endpoint, model, extra) for query in queries),
        streams=arguments.streams,
        seconds=arguments.seconds,
        warmup=arguments.warmup,
        server_pid=arguments.server_pid,
    )
    client.close()
    for error in sorted(set(load.errors)):
        print(f"failed: {error}")
    return {
        **host_circumstances(),
        "model": model,
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "warmup": arguments.warmup,
        **load.summary(),
        "rss_mb": [round(rss / 1e6, 1) for _, rss, _ in load.memory],
    }


def main(argv: list[str] | None = None) -> None:
    """Load, print, write, and exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--endpoint", default="/v1/completions")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--warmup", type=float, default=30, help="seconds not counted")
    parser.add_argument("--server-pid", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/load.json"))
    arguments = parser.parse_args(argv)
    result = asyncio.run(run(arguments))
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:20} {value:14.3f}")
    write_report(arguments.output, result)
    if broken := broken_bounds(result):
        raise SystemExit("; ".join(broken))


if __name__ == "__main__":
    main()
