"""The first minute after a first start: how fast is a server while its other executables compile?

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``:

    .venv/bin/python -m bench.first_minute [--output FILE] -- MODEL --load-format dummy

Three starts, each with an empty cache folder. From ready on, one client sends requests of 128
tokens one after the other; then as many clients as ``--clients`` send rounds of such requests at
once; then a server is killed 10 s after it was ready, and started again. A value is steady once all
executables are there. Exits with 1 if in the median one row took more than 1.5 times its steady
time per token before, or many rows gave less than 1 / 1.3 of their steady tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.server_process import ServerProcess

MAX_ALONE, MAX_TOGETHER = 1.5, 1.3
STEADY_SECONDS = 6.0  # measured after the last executable is there
LIMIT_SECONDS = 150.0
KILL_SECONDS = 10.0
OUTPUT_TOKENS = 128
PROMPT_TOKENS = 160  # as HumanEval's chats have


class Server(ServerProcess):
    """A server, and when its executables were complete."""

    def __init__(self, cache: str, arguments: list[str]) -> None:
        super().__init__(*arguments, f"--cache-dir={cache}")
        self.ready_at = time.perf_counter()
        self.log: list[str] = []

    def close(self) -> None:
        """End the server, and keep the lines of its log that report on the start."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        self.log = [line for line in lines if "access" not in line][:200]
        super().close()

    async def stats(self, client: Client) -> dict[str, Any]:
        """The counters: executables that are not there yet, steps by their kind."""
        return json.loads((await client.get("/stats")).body)


def body(number: int) -> bytes:
    """A streamed request whose prompt no other has."""
    prompt = [1000 + (number * 7919 + i * 104729) % 20000 for i in range(PROMPT_TOKENS)]
    fields = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    return json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()


async def send(client: Client, number: int) -> Answer:
    """One request; raises ``RuntimeError`` if it fails."""
    answer = await client.post("/v1/completions", body(number))
    if answer.error or answer.output_tokens != OUTPUT_TOKENS:
        raise RuntimeError(f"{answer.status} {answer.error} {answer.output_tokens}")
    return answer


async def until_steady(
    server: Server, one_round: Callable[[Client], Awaitable[dict[str, float]]]
) -> dict[str, Any]:
    """Rounds from ready on until ``STEADY_SECONDS`` after the last executable is there."""
    client, rounds = Client(server.url), list[dict[str, Any]]()
    complete: float | None = None
    before = await server.stats(client)
    while True:
        now = time.perf_counter() - server.ready_at
        if complete is not None and now > complete + STEADY_SECONDS:
            break
        if now > LIMIT_SECONDS:
            raise RuntimeError(f"not complete after {LIMIT_SECONDS} s: {rounds[-1:]}")
        rounds.append({"at": round(now, 3), **await one_round(client)})
        now_is = await server.stats(client)
        rounds[-1]["awaited"] = now_is["executables"]["awaited"]
        rounds[-1]["steps"] = steps_between(before["steps"], now_is["steps"])
        before = now_is
        if complete is None and not rounds[-1]["awaited"]:
            complete = time.perf_counter() - server.ready_at
    client.close()
    return {"complete_at": complete, "rounds": rounds}


def steps_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """The number of steps of each kind, and their mean milliseconds."""
    found: dict[str, tuple[int, float]] = {}
    for kind, now in after.items():
        was = before[kind]
        count = now["count"] - was["count"]
        total = now["count"] * (now["mean"] or 0) - was["count"] * (was["mean"] or 0)
        found[kind] = count, round(1e3 * total / count, 3) if count else 0.0
    return found


def alone() -> Callable[[Client], Awaitable[dict[str, float]]]:
    """One request after the other."""
    count = iter(range(10**6))

    async def one_round(client: Client) -> dict[str, float]:
        answer = await send(client, next(count))
        tpot = (answer.latency - answer.ttft) / (OUTPUT_TOKENS - 1)
        worst = max(answer.gaps)
        return {"ttft_ms": 1e3 * answer.ttft, "tpot_ms": 1e3 * tpot, "worst_gap_ms": 1e3 * worst}

    return one_round


def together(clients: int) -> Callable[[Client], Awaitable[dict[str, float]]]:
    """Rounds of requests at once."""
    count = iter(range(10**6))

    async def one_round(client: Client) -> dict[str, float]:
        start = time.perf_counter()
        await asyncio.gather(*(send(client, next(count)) for _ in range(clients)))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens_per_s": clients * OUTPUT_TOKENS / seconds}

    return one_round


def compared(found: dict[str, Any], value: str, *, less_is_better: bool) -> dict[str, Any]:
    """The steady value, and the ratios to it of rounds before all executables were there."""
    complete, rounds = found["complete_at"], found["rounds"]
    steady = median(one[value] for one in rounds if one["at"] > complete)
    early = [one[value] for one in rounds if one["at"] <= complete]
    ratios = [one / steady if less_is_better else steady / one for one in early]
    return {"steady": steady, "median_ratio": median(ratios), "worst_ratio": max(ratios), **found}


def killed_start(arguments: list[str]) -> dict[str, Any]:
    """A start that is killed ``KILL_SECONDS`` after ready, and the next one."""
    with tempfile.TemporaryDirectory() as cache:
        first = Server(cache, arguments)
        try:
            time.sleep(KILL_SECONDS)
            children = _descendants(first.pid)
            for pid in (first.pid, *children):
                os.kill(pid, signal.SIGKILL)
        finally:
            first.close()
        manifests = list(Path(cache, "executables").glob("*/manifest.json"))
        saved = len(json.loads(manifests[0].read_text())["executables"])
        with Server(cache, arguments) as second:
            found = asyncio.run(until_steady(second, alone()))
        return {
            "first_ready_seconds": first.ready_seconds,
            "saved": saved,
            "ready_seconds": second.ready_seconds,
            "complete_at": found["complete_at"],
        }


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *_descendants(child))]


def main() -> int:
    """Measure, print a summary and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=164)
    parser.add_argument("--parts", default="alone,together,killed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="+", help="model and flags of jaxinfer serve, after --")
    given = parser.parse_args()
    report: dict[str, Any] = {
        "serve": given.serve,
        **host_circumstances("jaxinfer", "pallas_kernels"),
    }
    measured = {
        "alone": (alone(), "tpot_ms", True),
        "together": (together(given.clients), "tokens_per_s", False),
    }
    for name, (one_round, value, less_is_better) in measured.items():
        if name not in given.parts.split(","):
            continue
        with tempfile.TemporaryDirectory() as cache, Server(cache, given.serve) as server:
            found = asyncio.run(until_steady(server, one_round))
        made = compared(found, value, less_is_better=less_is_better)
        report[name] = {"ready_seconds": server.ready_seconds, **made, "log": server.log}
        print(
            f"{name}: ready {server.ready_seconds:.1f} s, complete {made['complete_at']:.1f} s "
            f"later; {value} steady {made['steady']:.2f}, before {made['median_ratio']:.2f} times "
            f"worse in the median, {made['worst_ratio']:.2f} times at most",
            flush=True,
        )
        if given.output:
            write_report(given.output, report)
    if "killed" in given.parts.split(","):
        report["killed"] = killed_start(given.serve)
        print(f"killed: {report['killed']}", flush=True)
        if given.output:
            write_report(given.output, report)
    ratios = [report[name]["median_ratio"] for name in measured if name in report]
    return int(any(r > m for r, m in zip(ratios, (MAX_ALONE, MAX_TOGETHER), strict=False)))


if __name__ == "__main__":
    raise SystemExit(main())
