"""The time that the engine adds to a compiled step, and its split by part of the host's work.

Owns: the bare loop over a decode bucket, the timing of the engine's own decoding, and the split of
host time. The bare loop waits for each step's tokens; the engine plans the next step while one
runs, so it may even be faster.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from jaxinfer.bench.numbers import rotated
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import Bucket, Pages, ScheduledSeq, StepPlan
from jaxinfer.engine.loop import loop as loop_module
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.start.build import build_engine, plan_engine
from jaxinfer.exec.run import executor as executor_module
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor, InFlight
from jaxinfer.exec.step.batch import pack


class BareSteps:
    """A compiled decode bucket in a loop, with its own page pool and slots."""

    def __init__(self, executor: Executor) -> None:
        self._program, self._by_name = executor._program, executor._arrays.executables
        self._weights = executor._arrays.weights
        self._state, self._slots = init_state(self._program)

    def ms_per_step(self, batch: int, contexts: range) -> float:
        """Mean over one step per context length; batches are packed before the clock starts."""
        limits = self._program.limits
        bucket = decode_bucket(limits, batch)
        layout = self._program.layout(bucket)
        step = self._by_name[bucket.name]
        batches = [pack(decode_plan(limits, batch, n), layout) for n in contexts]
        state, slots = self._state, self._slots
        started = time.perf_counter()
        for flat in batches:
            state, slots, output = step(self._weights, state, slots, flat)
            np.asarray(output.token_ids)
        seconds = time.perf_counter() - started
        self._state, self._slots = state, slots
        return 1e3 * seconds / len(batches)


def decode_bucket(limits: Limits, batch: int) -> Bucket:
    """The smallest bucket for a decode step of ``batch`` sequences."""
    return min(bucket for bucket in limits.buckets if bucket.holds(Bucket(batch)))


def decode_plan(limits: Limits, batch: int, context: int) -> StepPlan:
    """A decode step of ``batch`` sequences whose context, the new token included, is ``context``.

    Sequence i owns the i-th run of pages after the padding page.
    """
    num_pages = -(-context // limits.page_size)
    rows = tuple(
        ScheduledSeq(
            request_id=str(i),
            epoch=0,
            slot=i,
            num_computed_tokens=context - 1,
            num_scheduled_tokens=1,
            pages=(Pages(IntLog(range(1 + i * num_pages, 1 + (i + 1) * num_pages))),),
        )
        for i in range(batch)
    )
    return StepPlan(0, decode_bucket(limits, batch), (), rows, ())


def engine_ms_per_step(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Mean over the decode steps: from the iteration with the first tokens to the last one."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), RequestSpec(prompt, params))
    waiting = {str(i) for i in range(len(prompts))}  # some may get tokens before others begin
    while waiting:
        deltas = engine.step().deltas
        if errors := [delta.error for delta in deltas if delta.error]:
            raise RuntimeError(errors[0])
        waiting -= {delta.request_id for delta in deltas if delta.token_ids}
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return 1e3 * (time.perf_counter() - started) / (num_tokens - 1)


def host_split(
    engine: Engine, executor: Executor, prompts: list[list[int]], num_tokens: int
) -> dict[str, float]:
    """Milliseconds per decode step by part, from an instrumented run.

    schedule; pack; dispatch (the rest of launching); wait (for the device); collect (reading the
    tokens); process (the rest of an iteration: detokenizing, endings).
    """
    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                seconds[part] += time.perf_counter() - started

        return call

    wait, collect = timed("wait", jax.block_until_ready), timed("collect", executor.collect)

    def collect_when_ready(step: InFlight) -> Any:
        wait(step.token_ids)
        result = collect(step)
        if step.prepared.plan.prefills:
            seconds.clear()  # the decode steps start here
        return result

    with (
        patch.object(loop_module, "schedule", timed("schedule", loop_module.schedule)),
        patch.object(executor_module, "pack", timed("pack", executor_module.pack)),
        patch.object(executor, "launch", timed("launch", executor.launch)),
        patch.object(executor, "collect", collect_when_ready),
    ):
        total = engine_ms_per_step(engine, prompts, num_tokens)
    steps = num_tokens - 1
    parts = {part: 1e3 * value / steps for part, value in seconds.items()}
    parts["dispatch"] = parts.pop("launch") - parts["pack"]
    parts["process"] = total - sum(parts.values())
    order = ("schedule", "pack", "dispatch", "wait", "collect", "process")
    return {part: parts[part] for part in order}


def measure_overhead(
    gguf: Path,
    prompts: list[list[int]],
    *,
    batches: tuple[int, ...],
    num_tokens: int,
    repeats: int,
) -> tuple[dict[tuple[str, int], list[float]], dict[int, dict[str, float]]]:
    """Milliseconds per step by ("engine" or "bare", batch), in rotating order, and host time."""
    engine, executor, bare = build_parts(gguf)
    length = len(prompts[0])
    runs: dict[str, Callable[[int], float]] = {
        "engine": lambda batch: engine_ms_per_step(engine, prompts[:batch], num_tokens),
        "bare": lambda batch: bare.ms_per_step(batch, range(length + 1, length + num_tokens)),
    }
    samples: dict[tuple[str, int], list[float]] = {}
    for batch in batches:
        for name, run in runs.items():
            run(batch)  # warm
            samples[name, batch] = []
    for repeat in range(repeats):
        for batch in batches:
            for name in rotated(list(runs), repeat):
                samples[name, batch].append(runs[name](batch))
    splits = {n: host_split(engine, executor, prompts[:n], num_tokens) for n in batches}
    return samples, splits


def build_parts(gguf: Path) -> tuple[Engine, Executor, BareSteps]:
    """An engine, and the bare loop on the same executables and weights."""
    config = EngineConfig(model=os.fspath(gguf), enable_prefix_caching=False)
    engine = build_engine(plan_engine(config))
    executor: Any = engine._loop._executor
    return engine, executor, BareSteps(executor)
