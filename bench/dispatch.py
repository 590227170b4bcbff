"""Host time of the call of a compiled step, and its parts.

    python -m bench.dispatch --config bench/shapes/qwen3-4b/config.json --steps d1,p1024x64

Each call starts when the device is idle, so nothing waits in it. Two other calls are measured for
comparison: ``leaves`` takes and returns the same arrays and computes nothing, so the difference to
a step is the launch of its kernels; ``resident`` is the step with its batch already on the device,
at the same address each time. On a GPU a step is one CUDA graph, and XLA records every node again
whose memory has moved since the last call. XLA logs their number and the time:

    TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=command_buffer_thunk=3,command_executor=1

The allocator decides whether memory moves: XLA_PYTHON_CLIENT_ALLOCATOR=vmm, an engine's default, or
bfc.

``--spans 30`` prints the spans of JAX's and XLA's own host tracer during a call, summed by name (a
span includes the spans within it). XLA runs no CUDA graphs while it is traced, unless

    XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true

Owns: the three calls, their timing and their spans.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from bench.throughput import rotated
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.step import StepPlan
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.step.batch import pack
from jaxinfer.exec.step.forward import flat_params

CALLS = ("leaves", "step", "resident")
HOST = "/host:CPU"  # the plane of the host's threads in a trace


class Device:
    """Weights, pages and slots of a program, and the host time of calls on them."""

    def __init__(self, program: Program, params: Any) -> None:
        self._program = program
        self._weights = flat_params(program.model, params)
        self._state = init_state(program)
        self.num_leaves = len(jax.tree.leaves((self._weights, self._state)))

    def calls(self, name: str) -> Mapping[str, Callable[[], float]]:
        """The calls of the step ``name``: each runs once and returns the host's microseconds."""
        program = self._program
        bucket = next(one for one in program.limits.buckets if one.name == name)
        plan = StepPlan(-1, bucket, (), (), ())
        inputs = [pack(plan, program.layout(bucket))]
        resident = [jnp.array(one) for one in inputs]
        step = program.trace(name).lower().compile()
        leaves = jax.jit(_leaves, donate_argnums=(1, 2), keep_unused=True)
        nothing = leaves.lower(self._weights, *self._state, *inputs).compile()
        return {
            "leaves": lambda: self._timed(nothing, inputs),
            "step": lambda: self._timed(step, inputs),
            "resident": lambda: self._timed(step, resident),
        }

    def _timed(self, call: Callable[..., Any], inputs: list[Any]) -> float:
        jax.block_until_ready(self._state)
        started = time.perf_counter()
        *state, _ = call(self._weights, *self._state, *inputs)
        seconds = time.perf_counter() - started
        self._state = tuple(state)
        return 1e6 * seconds


def _leaves(weights: Any, pages: Any, slots: Any, flat: jax.Array) -> Any:
    del weights
    return pages, slots, flat[:1]


def measure(calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median microseconds of each call; the order of the calls rotates."""
    samples: dict[str, list[float]] = {call: [] for call in CALLS}
    for repeat in range(-3, repeats):  # the first run loads, the second records a CUDA graph
        for call in rotated(list(CALLS), repeat):
            # the first call of each is slower after another executable
            some = [calls[call]() for _ in range(5)]
            if repeat >= 0:
                samples[call] += some[1:]
    return {call: median(some) for call, some in samples.items()}


def spans(call: Callable[[], object], times: int) -> dict[str, float]:
    """Microseconds of a call by the name of the span, the longest first."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 3
    total: defaultdict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(times):
                call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in ProfileData.from_file(str(file)).planes:
            if plane.name == HOST:
                for line in plane.lines:
                    for event in line.events:
                        total[event.name] += 1e-3 * event.duration_ns / times
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", required=True, help="config.json of the shapes")
    parser.add_argument("--steps", default="d1", help="names of buckets, joined by commas")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--num-pages", type=int, default=4096)
    parser.add_argument("--max-model-len", type=int, default=16512)
    parser.add_argument("--spans", type=int, default=0, help="show so many of each step")
    given = parser.parse_args()
    config = EngineConfig(
        model=given.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_pages=given.num_pages,
        max_model_len=given.max_model_len,
    )
    plan = plan_engine(config)
    program = plan.program
    device = Device(program, plan.load_params(NO_PROGRESS))
    for name in given.steps.split(","):
        calls = device.calls(name)
        taken = measure(calls, given.repeats)
        parts = "  ".join(f"{call} {value:7.0f} us" for call, value in taken.items())
        print(f"{name:10} {device.num_leaves} leaves  {parts}", flush=True)
        if given.spans:
            for span, value in islice(spans(calls["step"], given.repeats).items(), given.spans):
                print(f"{value:12.1f} us  {span}", flush=True)


if __name__ == "__main__":
    main()
