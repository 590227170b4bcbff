"""publish: return tokens, and write them to memory that the host reads.

An array's copy to the host goes through the driver: a callback at the end of the step wakes a
thread, which wakes another that requests the copy, whose callback wakes the waiting thread. On an
H200 this took 0.5 to 1.2 ms. A kernel's writes to host memory are visible after microseconds.
"""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import without_triton
from pallas_kernels.publish import cases, ref
from pallas_kernels.publish.ref import PublishArgs

_triton = imported_when_called("pallas_kernels.publish.triton", "publish")


def _triton_supports(args: PublishArgs) -> str | None:
    return without_triton() if args.tokens.size else "there are no rows"


OP = KernelOp(
    name="publish",
    ref=ref.publish,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=_triton_supports),
        Impl("xla", ref.publish),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0},
    feeds=((0, 0),),
)


def publish(args: PublishArgs, impl: str | None = None) -> jax.Array:  # int32[B]
    """The same tokens, none of them negative.

    The Triton kernel also writes ``number << 32 | token`` of each row into the int64[B] at a host
    address. ``place`` holds the low half of the address, its high half and the number. An entry is
    one store of eight bytes, so an entry with the right number has its token too (as in NCCL's LL
    protocol). Nothing is written at address 0. The XLA implementation never writes, so readers must
    fall back to the result. ``impl`` pins an implementation. Raises ValueError on arguments that do
    not fit together.
    """
    tokens, place = args.tokens, args.place
    if tokens.ndim != 1 or tokens.dtype != "int32":
        raise ValueError(f"publish: tokens are {tokens.dtype}{tokens.shape}, not int32[B]")
    if place.shape != (3,) or place.dtype != "int32":
        raise ValueError(f"publish: the place is {place.dtype}{place.shape}, not int32[3]")
    return dispatch(OP, (args,), {}, impl)
