"""all_reduce: the sum of each device's partial result, on all devices of a mesh axis."""

from __future__ import annotations

import jax

from pallas_kernels.all_reduce import cases, launch, ref, xla
from pallas_kernels.all_reduce.ref import AllReduceArgs, Peers
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.all_reduce.triton", "all_reduce")

OP = KernelOp(
    name="all_reduce",
    ref=ref.all_reduce,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.all_reduce),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 1e-6, "bfloat16": 0.0},
    feeds=(),
)

__all__ = ["OP", "AllReduceArgs", "Peers", "all_reduce"]


def all_reduce(args: AllReduceArgs, impl: str | None = None) -> jax.Array:
    """The sum over the devices of ``axis``, [T, D] in the partials' dtype.

    Split-K partials float32[S, T, D] are added, too, and the result is float32[1, T, D]. All
    devices get the same bits. Inside ``jax.shard_map`` every device makes the same calls in the
    same order, and a call depends on the result of the one before it. ``impl`` pins an
    implementation; Triton's needs ``peers``, and its result is NaN if a device does not answer
    within about 5 s. Raises ValueError on arguments that do not fit together.
    """
    partials = args.partials
    if partials.ndim not in (2, 3) or (partials.ndim == 3 and partials.dtype != "float32"):
        raise ValueError(
            f"all_reduce: partials are {partials.dtype}{partials.shape}, not [T, D] or "
            "float32[S, T, D]"
        )
    if args.peers is not None and args.peers.addresses.size % 2:
        raise ValueError("all_reduce: an address has two halves")
    return dispatch(OP, (args,), {}, impl)
