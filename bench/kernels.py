"""Times every implementation of every kernel op on its bench cases, on the device at hand.

Run from the repository root: ``python -m bench.kernels [--op NAME] [--case TEXT] [--output FILE]``.
Bandwidth and operations are those that the op cannot do without (``KernelOp.cost``), so a share of
the ceiling below one is time lost. The ceiling is measured here: an array rewritten in place.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from bench.circumstances import circumstances
from pallas_kernels.registry import Case, Impl, KernelOp, all_ops
from pallas_kernels.testing import runnable

SECONDS_PER_CASE = 0.5
SECONDS_PER_SAMPLE = 0.005  # calls are launched back to back for this long, then awaited
CEILING_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31, "tpu": 1 << 30}  # well past any cache


def seconds_per_call(call: Callable[[], Any]) -> float:
    """Median over samples; ``call`` launches one run and returns something to wait for."""
    jax.block_until_ready(call())  # compiles
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, int(SECONDS_PER_SAMPLE / (time.perf_counter() - started)))
    samples: list[float] = []
    end = time.perf_counter() + SECONDS_PER_CASE
    while len(samples) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - started) / calls)
    return median(samples)


def ceiling_bytes_per_second() -> float:
    """Bytes per second of reading and rewriting a large array in place."""
    size = CEILING_BYTES[jax.default_backend()]
    array = jnp.zeros(size // 4, jnp.float32)
    rewrite = jax.jit(lambda x: x + 1.0, donate_argnums=0)

    def call() -> jax.Array:
        nonlocal array
        array = rewrite(array)
        return array

    return 2 * size / seconds_per_call(call)


def time_case(op: KernelOp, impl: Impl, case: Case, ceiling: float) -> dict[str, Any]:
    """One row of the table; {"skipped": reason} when the implementation cannot run the case."""
    row: dict[str, Any] = {"op": op.name, "impl": impl.name, "case": case.name}
    inputs = op.build(case, 0)
    if (reason := runnable(impl, inputs)) is not None:
        return row | {"skipped": reason}
    args = [jnp.asarray(array) for array in inputs.args]
    run = jax.jit(partial(impl.fn, **inputs.static), donate_argnums=op.donate)

    def call() -> Any:
        outputs = run(*args)
        for index, argument in enumerate(op.donate):
            args[argument] = outputs[index]
        return outputs

    seconds, cost = seconds_per_call(call), op.cost(case)
    return row | {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(cost.bytes / seconds / 1e9, 2),
        "tflop_per_s": round(cost.flops / seconds / 1e12, 4),
        "share_of_copy": round(cost.bytes / seconds / ceiling, 3),
    }


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="JSON file; by default bench/results/<device>")
    options = parser.parse_args()
    facts = circumstances("pallas_kernels")
    ceiling = ceiling_bytes_per_second()
    print(f"{facts['device']}: copies at {ceiling / 1e9:.1f} GB/s")
    print(f"{'op':14}{'impl':8}{'case':28}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of copy':>9}")
    rows = []
    for op in all_ops():
        if options.op not in (None, op.name):
            continue
        cases = [case for case in op.cases if "bench" in case.tags and options.case in case.name]
        for case, impl in ((case, impl) for case in cases for impl in op.impls):
            rows.append(row := time_case(op, impl, case, ceiling))
            label = f"{op.name:14}{impl.name:8}{case.name:28}"
            if "skipped" in row:
                print(f"{label}skipped: {row['skipped']}")
            else:
                print(
                    f"{label}{row['us']:10.1f}{row['gb_per_s']:9.2f}"
                    f"{row['tflop_per_s']:9.3f}{row['share_of_copy']:9.1%}",
                    flush=True,
                )
    slug = facts["device"].lower().replace(" ", "-")
    output = options.output or Path(__file__).parent / "results" / slug / "kernels.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {**facts, "copy_gb_per_s": round(ceiling / 1e9, 2), "rows": rows}
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
