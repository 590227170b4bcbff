"""all_reduce_norm: sum over devices, add to the residual stream, and normalise."""

from __future__ import annotations

import jax

from pallas_kernels.all_reduce_norm import cases, launch, ref, unfused
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs
from pallas_kernels.harness.pins import without_pins
from pallas_kernels.harness.registry import (
    Impl,
    KernelOp,
    current_platform,
    dispatch,
    imported_when_called,
    select,
)
from pallas_kernels.lib.checks import check_partials
from pallas_kernels.residual_norm.api import OP as RESIDUAL_NORM

_triton = without_pins(
    imported_when_called("pallas_kernels.all_reduce_norm.triton", "all_reduce_norm")
)

OP = KernelOp(
    name="all_reduce_norm",
    ref=ref.all_reduce_norm,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("unfused", unfused.unfused),
        Impl("xla", unfused.plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance=RESIDUAL_NORM.tolerance,
    feeds=((0, 0),),
)


def is_fused(args: AllReduceNormArgs) -> bool:
    """True if one kernel does the whole call; else the next norm may have a better one."""
    pinned = args.pins.of("all_reduce_norm")
    return select(OP, current_platform(), (args,), {}, pinned).name == "triton"


def all_reduce_norm(args: AllReduceNormArgs) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and the partials of all devices, and that sum normalised; both [T, D].

    That is ``all_reduce``, then ``residual_norm`` of ``x`` and its result, with the same bits of
    the sum. ``pins`` may name an implementation of this op, or of those, which then run one after
    the other. Raises ValueError on arguments that do not fit together.

    The kernel is chosen where it saves a launch. On an H200 a launch between two kernels costs 0.9
    us, and ``residual_norm`` 3 to 5 us with it (bench/results/h200/kernels.json). Rows of up to
    4,096 components in 16 bits have a Mosaic kernel for the norm, for one token inside the next
    GEMM (``norm_gemm``). In a step that decodes it is linked with that GEMM, which loads 96 KB of
    its weights on each SM in that time: 12.7 MB, or 3.2 us of its own memory traffic. The norm then
    costs next to nothing, but in the kernel of the sum it would come before the GEMM's first load.
    So there, ``before_gemm``, the sum stays a kernel of its own. These are estimates: no step was
    timed with both. Before a router, whose product is XLA's, nothing hides the norm: 1.7 us and a
    launch in Qwen3-30B-A3B. A pin of this op to "triton" takes the kernel anyway.
    """
    x, weights = args.norm.x, args.norm.weights
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"all_reduce_norm: tokens {x.shape} do not fit weights {weights.shape}")
    if not 0 <= args.norm.row < weights.shape[0]:
        raise ValueError(
            f"all_reduce_norm: there is no row {args.norm.row} in weights {weights.shape}"
        )
    if args.norm.partials is None:
        raise ValueError("all_reduce_norm: there are no partials to add")
    check_partials("all_reduce_norm", x, args.norm.partials)
    if args.peers is not None and args.peers.addresses.size % 2:
        raise ValueError("all_reduce_norm: an address has two halves")
    return dispatch(OP, (args,), {}, args.pins.of("all_reduce_norm"))
