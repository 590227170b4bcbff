"""Finds the fastest launch parameters of kernels for the steps of a GPU.

Run on the GPU, from the repository root:
``python -m bench.tune --op NAME [--case TEXT] [--output FILE]``.
It starts from the default rule's choices, varies one value after the other, keeps the faster ones,
and writes the choices to the op's folder, where calls with the same shapes find them.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels import bench_cases, seconds_in_a_chain
from jaxinfer.bench.circumstances import write_report
from pallas_kernels.append_decode import api as append_decode
from pallas_kernels.append_decode import launch as append_decode_launch
from pallas_kernels.append_decode import mosaic_launch as append_decode_mosaic_launch
from pallas_kernels.harness.registry import Case, KernelOp, imported_when_called
from pallas_kernels.harness.testing import runnable
from pallas_kernels.harness.tuned import Choices, read_choices, tuned_file
from pallas_kernels.paged_prefill import api as paged_prefill
from pallas_kernels.paged_prefill import launch as paged_prefill_launch
from pallas_kernels.skinny_gemm import api as skinny_gemm
from pallas_kernels.skinny_gemm import launch as skinny_gemm_launch
from pallas_kernels.swiglu_gemm import api as swiglu_gemm
from pallas_kernels.swiglu_gemm import launch as swiglu_gemm_launch

WORTHWHILE = 0.99  # a choice must take less than this share of the best time so far


@dataclass(frozen=True)
class Tunable:
    """An op with launch parameters (a frozen dataclass) in the implementation named ``impl``.

    ``starts`` takes a case and its arguments; the first of its choices is the rule's. Cases with
    the same ``shapes_of`` share a choice. ``values`` are tried in their order.
    """

    op: KernelOp
    starts: Callable[[Any, Sequence[Any]], Sequence[Any]]
    shapes_of: Callable[[Any], Hashable]
    values: tuple[tuple[str, tuple[int, ...]], ...]
    impl: str = "triton"

    @property
    def launch_with(self) -> Callable[..., Any]:
        """The op's implementation, with the choice before its arguments."""
        module = f"pallas_kernels.{self.op.name}.{self.impl}"
        if self.impl != "mosaic":
            return imported_when_called(module, "launch_with")
        # Lowered once for a chain of calls: 6 of append_decode take 3 s of Python (were 15 s).
        return jax.jit(importlib.import_module(module).launch_with, static_argnums=0)


def _append_starts(launch: Any, case: Any, args: Sequence[Any]) -> Sequence[Any]:
    return (launch.heuristic_config(*args),)


def _prefill_starts(case: Any, args: Sequence[Any]) -> Sequence[paged_prefill_launch.TritonConfig]:
    """Small and large tiles, since the best number of warps depends on them."""
    tiles = ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))
    choices = (paged_prefill_launch.TritonConfig(*tile) for tile in tiles)
    return tuple(
        dict.fromkeys(
            (
                paged_prefill_launch.heuristic_config(
                    args[0].q, is_scaled=args[0].k_scales is not None
                ),
                *choices,
            )
        )
    )


def _gemm_starts(case: Any, args: Sequence[Any]) -> Sequence[skinny_gemm_launch.GemmConfig]:
    return (skinny_gemm_launch.heuristic_config(case.sizes),)


def _swiglu_starts(case: Any, args: Sequence[Any]) -> Sequence[swiglu_gemm_launch.SwigluConfig]:
    """Large and small tiles: the best of the rest depends on them."""
    sizes = swiglu_gemm_launch.sizes_of(*args)
    small = swiglu_gemm_launch.SwigluConfig(128, 64, 64, 6, 2, 8)
    return (swiglu_gemm_launch.heuristic_config(sizes), small)


TUNABLE = {
    "append_decode": Tunable(
        append_decode.OP,
        partial(_append_starts, append_decode_launch),
        append_decode_launch.shapes_of,
        (
            ("splits", (1, 2, 4, 8, 16, 32, 64)),
            ("block", (16, 32, 64, 128)),
            ("num_stages", (2, 3, 5, 7)),
            ("num_warps", (2, 4, 8)),
        ),
    ),
    "append_decode/mosaic": Tunable(
        append_decode.OP,
        partial(_append_starts, append_decode_mosaic_launch),
        append_decode_mosaic_launch.shapes_of,
        (
            ("splits", (1, 2, 4, 8)),
            ("block", (64, 128)),
            ("stages", (2, 3, 4, 6)),
            ("max_clusters", (132, 264, 1 << 20)),
        ),
        impl="mosaic",
    ),
    "paged_prefill": Tunable(
        paged_prefill.OP,
        _prefill_starts,
        paged_prefill_launch.shapes_of,
        (
            ("rows", (64, 128, 256)),
            ("block", (32, 64, 128)),
            ("num_stages", (2, 3, 4, 5)),
            ("num_warps", (4, 8)),
        ),
    ),
    "skinny_gemm": Tunable(
        skinny_gemm.OP,
        _gemm_starts,
        skinny_gemm_launch.shapes_of,
        (
            ("split_k", (1, 2, 3, 4)),
            ("block_k", (64, 128, 256)),
            ("stages", (2, 3, 4, 5, 6, 7, 9, 12)),
            ("warpgroups", (1, 2)),
        ),
        impl="mosaic",
    ),
    "swiglu_gemm": Tunable(
        swiglu_gemm.OP,
        _swiglu_starts,
        swiglu_gemm_launch.shapes_of,
        (
            ("cluster", (1, 2)),
            ("lead", (0, 1, 2)),
            ("group", (2, 4, 8, 16, 32)),
        ),
        impl="mosaic",
    ),
}


def tune(tunable: Tunable, cases: Sequence[Any]) -> Any:
    """The fastest choice found for cases that share one, by the sum of their seconds per byte.

    It imports the kernel, so it needs a GPU.
    """
    op = tunable.op
    calls = [op.build(case, 0) for case in cases]
    arrays = [jax.tree.map(jnp.asarray, inputs.args) for inputs in calls]
    costs = [op.cost(case) for case in cases]

    def score(choice: Any) -> float:
        total = 0.0
        for inputs, arguments, cost in zip(calls, arrays, costs, strict=True):
            function = partial(tunable.launch_with, choice, **inputs.static)
            try:
                total += seconds_in_a_chain(op, function, arguments, cost) / cost.bytes
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                print(f"  {choice}: {str(error).splitlines()[0]}")
                return math.inf
        return total

    starts = tunable.starts(cases[0], arrays[0])
    scores = [score(start) for start in starts]
    least, by_rule = min(scores), scores[0]
    best = starts[scores.index(least)]
    for name, values in tunable.values:
        for choice in [replace(best, **{name: v}) for v in values if v != getattr(best, name)]:
            if (taken := score(choice)) < WORTHWHILE * least:
                best, least = choice, taken
    rates = (len(cases) / x / 1e9 for x in (by_rule, least))
    print(
        "{}: {:.0f} GB/s by the rule, {:.0f} by {}".format(cases[0].name, *rates, best), flush=True
    )
    return best


def merged_choices(tunable: Tunable, before: Choices, found: Choices) -> Choices:
    """The new choices, and those of the old ones that are for other shapes.

    Two names with the same shapes would be ambiguous.
    """
    shapes = {case.name: tunable.shapes_of(case) for case in tunable.op.cases}
    taken = {shapes[name] for name in found}
    kept = {name: choice for name, choice in before.items() if shapes.get(name) not in taken}
    return kept | found


def main() -> None:
    """Tune, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", required=True, choices=TUNABLE, help="the op, or op/impl")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="JSON file; by default beside the op")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"bench.tune times kernels and needs a GPU, not {device}")
    tunable = TUNABLE[options.op]
    op = tunable.op
    output = options.output or Path(str(tuned_file(options.op, device.device_kind)))
    kernel = next(impl for impl in op.impls if impl.name == tunable.impl)
    groups: dict[Hashable, list[Case]] = {}
    for case in bench_cases(op, options.case):
        if "gpu" in case.tags and runnable(kernel, op.build(case, 0)) is None:
            groups.setdefault(tunable.shapes_of(case), []).append(case)
    found = {cases[0].name: asdict(tune(tunable, cases)) for cases in groups.values()}
    choices = merged_choices(tunable, read_choices(output), found)
    write_report(output, choices)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
