"""all_gather: the columns that the devices of a mesh axis have of a matrix, on all of them."""

from __future__ import annotations

import jax

from pallas_kernels.all_gather import cases, launch, ref, xla
from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.all_gather.triton", "all_gather")

OP = KernelOp(
    name="all_gather",
    ref=ref.all_gather,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.all_gather),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 0.0, "bfloat16": 0.0},
    feeds=((0, 0),),
)

__all__ = ["OP", "AllGatherArgs", "all_gather"]


def all_gather(args: AllGatherArgs, impl: str | None = None) -> jax.Array:
    """The first C columns [T, C] of the matrix [T, N * W] whose W columns each of N devices has.

    The values do not change. Inside ``jax.shard_map`` every device makes the same calls in the same
    order, also of ``all_reduce``, and a call depends on the result of the one before it. ``impl``
    pins an implementation; Triton's needs ``peers``, and a device's columns are NaN if it does not
    answer within about 5 s. Raises ValueError on arguments that do not fit together.
    """
    if args.x.ndim != 2:
        raise ValueError(f"all_gather: x is {args.x.dtype}{args.x.shape}, not [T, W]")
    devices = 1 if args.axis is None else jax.lax.axis_size(args.axis)
    if not 0 < args.columns <= devices * args.x.shape[1]:
        raise ValueError(
            f"all_gather: {devices} devices have no {args.columns} columns in {args.x.shape}"
        )
    if args.peers is not None and args.peers.addresses.size % 2:
        raise ValueError("all_gather: an address has two halves")
    return dispatch(OP, (args,), {}, impl)
