"""publish: hand tokens on, and write them where the host looks for them.

A device's arrays come to the host by way of its driver: a callback when the device is done wakes a
thread, which wakes another that asks for the copy, which ends with a callback that wakes whoever
waits. On an H200 0.5 to 1.2 ms passed between a step and its tokens. What a kernel writes into
memory that both see is there after microseconds.
"""

from __future__ import annotations

import jax

from pallas_kernels.publish import cases, launch, ref
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.publish.triton", "publish")

OP = KernelOp(
    name="publish",
    ref=ref.publish,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", ref.publish),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0},
    feeds=((0, 0),),
)


def publish(
    tokens: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
    *,
    impl: str | None = None,
) -> jax.Array:  # int32[B]
    """The same tokens, none of them negative.

    Where it can, it also writes entry ``number << 32 | token`` of each row into the int64[B] that
    begins at an address: the low half of the address, its high half and the number are ``place``.
    An entry is one store of eight bytes, so one with the right number has its token too (as in the
    LL protocol of NCCL). At address 0 it writes nothing. XLA cannot write there at all, so whoever
    looks has to look at the result as well. ``impl`` pins an implementation. Raises ValueError on
    arguments that do not fit together.
    """
    if tokens.ndim != 1 or tokens.dtype != "int32":
        raise ValueError(f"publish: tokens are {tokens.dtype}{tokens.shape}, not int32[B]")
    if place.shape != (3,) or place.dtype != "int32":
        raise ValueError(f"publish: the place is {place.dtype}{place.shape}, not int32[3]")
    return dispatch(OP, (tokens, place), {}, impl)
