"""Simulates a level of a served sweep without a device, with the real scheduler and buckets.

Run from the repository root; the last level of the sweep, and one below saturation:

    .venv/bin/python -m bench.levels --cached 384
    .venv/bin/python -m bench.levels --cached 288 --num-prompts 384 --request-rate 32

The loop and the scheduler are the real ones, with the sizes of ``configs/engine/gpu.toml``. The
clock is the device's: a step takes the time that ``step_ms`` returns, and nothing else takes time
except a request's passage through the server. So the effect of a change of policy or of buckets can
be seen before anything is compiled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from jaxinfer.bench.numbers import percentile
from jaxinfer.bench.offer import rate_of
from jaxinfer.bench.workload import arrivals
from jaxinfer.cli.settings import size
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.step import Arrive, Event, RowResult, StepPlan, StepResult
from jaxinfer.engine.loop.loop import EngineLoop
from jaxinfer.exec.compile.sizes import limits_of, with_device_defaults

NUM_PAGES, MAX_MODEL_LEN = 52_000, 16_384
# Qwen3-4B on one H200 (docs/performance.md), ms: a decode step by rows of 1,088 keys, a prompt step
# by tokens. In a decode step a row's keys take 38 us, the rest depends on the bucket's rows. In a
# step with a chunk, a bucket's row costs only its share of matmuls that the chunk has made long
# already, and sampling has more rows (128 rows with 1,024 tokens take 20 ms, 512 rows with 384
# tokens 34 ms).
KEYS_MS, KEYS = 0.038, 1088
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
ROWS_MS = (2.72, 2.82, 3.15, 3.80, 5.10, 7.85, 13.6, 26.0)
TOKENS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
TOKENS_MS = (0.0, 3.5, 5.0, 7.5, 12.7, 26.0, 54.0, 101.0)
MIXED_MS, MIXED_ROW_MS = 1.0, 0.011


def step_ms(plan: StepPlan) -> float:
    """The device's time for a step, from its bucket and the keys that its rows read."""
    bucket = plan.bucket
    keys = KEYS_MS * sum(row.num_computed_tokens for row in plan.rows) / KEYS
    if bucket.num_prefills:
        tokens = float(np.interp(bucket.num_prefill_tokens, TOKENS, TOKENS_MS))
        mixed = MIXED_MS + MIXED_ROW_MS * bucket.num_decodes if bucket.num_decodes else 0.0
        return tokens + mixed + keys
    rest = [ms - KEYS_MS * rows for rows, ms in zip(ROWS, ROWS_MS, strict=True)]
    return float(np.interp(bucket.num_decodes, ROWS, rest)) + keys


@dataclass
class Device:
    """A ``StepExecutor`` that simulates steps one after the other, without waiting."""

    now: float = 0.0  # ms
    steps: list[tuple[float, float, StepPlan]] = field(
        default_factory=list[tuple[float, float, StepPlan]]
    )  # start, ms, plan
    _free_at: float = 0.0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        """Queue a step after the others."""
        start, ms = max(self.now, self._free_at), step_ms(plan)
        self._free_at = start + ms
        self.steps.append((start, ms, plan))
        return plan, self._free_at

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing: nothing is kept."""

    def collect(self, step: tuple[StepPlan, float]) -> StepResult:
        """Advance the clock to the end of the step."""
        plan, done = step
        self.now = max(self.now, done)
        rows = (RowResult(r.request_id, r.epoch, (5,) if r.samples else ()) for r in plan.rows)
        return StepResult(plan.step_id, tuple(rows))


@dataclass(frozen=True)
class Level:
    """Requests of one length with their times (ms); the first ``num_cached`` prompts are cached."""

    sent: Sequence[float]
    num_cached: int = 0
    input_len: int = 1024
    output_len: int = 128
    server_ms: float = 1.0  # of a request in the server; one request after the other


@dataclass(frozen=True)
class Outcome:
    """Times of each request's tokens since the level's start, ms, and the steps."""

    sent: Sequence[float]
    tokens: list[list[float]]
    steps: list[tuple[float, float, StepPlan]]

    def line(self) -> str:
        """The figures of ``jaxinfer bench serve``."""
        pairs = list(zip(self.sent, self.tokens, strict=True))
        ttft = [times[0] - sent for sent, times in pairs]
        tpot = [(times[-1] - times[0]) / max(1, len(times) - 1) for times in self.tokens]
        gaps = np.concatenate([np.diff(times) for times in self.tokens])
        e2el = [times[-1] - sent for sent, times in pairs]
        parts = [
            f"{name} {percentile(values, 50):.2f} / {percentile(values, 99):.2f}"
            for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", gaps), ("e2el", e2el))
        ]
        rate = 1e3 * sum(map(len, self.tokens)) / max(times[-1] for times in self.tokens)
        return f"{'  '.join(parts)}  {rate:.0f} tok/s"

    def by_bucket(self) -> list[str]:
        """The time of each bucket, a line each, the longest in all first."""
        lines: list[tuple[float, str]] = []
        for name in {plan.bucket.name for _, _, plan in self.steps}:
            some = [(ms, plan) for _, ms, plan in self.steps if plan.bucket.name == name]
            decodes = sum(len(plan.decodes) for _, plan in some)
            prompts = sum(row.num_scheduled_tokens for _, plan in some for row in plan.prefills)
            real = decodes + prompts
            share = 1 - real / sum(plan.bucket.num_tokens for _, plan in some)
            total = sum(ms for ms, _ in some)
            text = f"{name:14} {len(some):4} steps {total:8.0f} ms, {share:4.0%} of tokens padding"
            lines.append((-total, text))
        return [text for _, text in sorted(lines)]


def run(limits: Limits, level: Level) -> Outcome:
    """Fill the prefix cache, wait for the end of that, then offer the level."""
    device = Device()
    loop = EngineLoop(device, limits)
    # one by one, so that no sequence is preempted and no page evicted
    for number in range(level.num_cached):
        loop.iterate((Arrive(_request(f"cached-{number}", number, level, output_len=1)),))
        while not loop.idle:
            loop.iterate(())
    begin, device.steps = device.now, []
    server_free_at, todo = 0.0, list[tuple[float, int]]()
    for number, sent in enumerate(level.sent):
        server_free_at = max(server_free_at, sent) + level.server_ms
        todo.append((begin + server_free_at, number))
    tokens: list[list[float]] = [[] for _ in level.sent]
    while todo or not loop.idle:
        loop.wait_until_launchable()
        if loop.idle:
            device.now = max(device.now, todo[0][0])
        events: list[Event] = []
        while todo and todo[0][0] <= device.now:
            number = todo.pop(0)[1]
            events.append(Arrive(_request(str(number), number, level)))
        for event in loop.iterate(tuple(events)).events:
            tokens[int(event.request_id)] += [device.now - begin] * len(event.token_ids)
    return Outcome(level.sent, tokens, device.steps)


def _request(name: str, number: int, level: Level, output_len: int | None = None) -> Request:
    ids = np.random.default_rng([number]).integers(0, 150_000, level.input_len)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(ids.tolist()),
        sampling=SamplingParams(ignore_eos=True),
        max_tokens=output_len or level.output_len,
        seed=0,
        arrival=number,
    )


def gpu_limits(max_num_mixed_tokens: int | None) -> Limits:
    """A GPU's default sizes; ``max_num_mixed_tokens`` replaces the default if it is set."""
    config = EngineConfig(max_num_mixed_tokens=max_num_mixed_tokens)
    limits = limits_of(with_device_defaults(config, "gpu"), MAX_MODEL_LEN, platform="gpu")
    return structs.replace(limits, num_pages=(NUM_PAGES,) * len(limits.num_pages))


def main(argv: list[str] | None = None) -> None:
    """Simulate one level and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--request-rate", type=rate_of, default=math.inf, help="a second; or inf")
    parser.add_argument("--cached", type=int, default=0, help="prompts that were asked before")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument(
        "--server-ms", type=float, default=1.0, help="of each request in the server"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max-num-mixed-tokens", type=size, help="as of `jaxinfer serve`")
    given = parser.parse_args(argv)
    sent = arrivals(given.num_prompts, given.request_rate, 1.0, given.seed)
    level = Level(
        sent=[1e3 * seconds for seconds in sent],
        num_cached=given.cached,
        input_len=given.input_len,
        output_len=given.output_len,
        server_ms=given.server_ms,
    )
    outcome = run(gpu_limits(given.max_num_mixed_tokens), level)
    print(outcome.line())
    print(*outcome.by_bucket(), sep="\n")


if __name__ == "__main__":
    main()
