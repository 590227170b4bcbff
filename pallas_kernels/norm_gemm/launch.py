"""Which calls the Mosaic kernel of norm_gemm takes, and how it cuts them up.

Owns: ``supports``, ``results``, ``Launch``, ``choose``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.checks import not_hopper
from pallas_kernels.device import current_device
from pallas_kernels.pins import Pins
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS, MOST_PARTS, TILES, WIDEST

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
ROWS = 8  # of tokens in shared memory: as many as the matrix units take, of which one is filled
SHARED_BYTES = 224 << 10  # of a multiprocessor, less what barriers take
BYTES = 96 << 10  # of weights on their way; more were no faster on an H200
INSTEAD = ("residual_norm", "skinny_gemm", "swiglu_gemm")  # a pin of one of them is heeded


class Sizes(NamedTuple):
    """What a choice may depend on: [1, D] @ [D, O], or [D, 2 * O] with ``swiglu``."""

    inner: int
    outer: int
    swiglu: bool


@dataclass(frozen=True)
class Launch:
    """How a call is cut up: inner components of a step, and steps on their way at once.

    A program makes 64 columns of the result, with ``swiglu`` of as many gates and as many ups.
    ``stages`` are 2 or more, as the room of one is free only when the next has begun.
    """

    block_k: int
    stages: int


def sizes_of(x: jax.Array, w: jax.Array, *, swiglu: bool) -> Sizes:
    """Of a call."""
    return Sizes(x.shape[1], w.shape[1] // (1 + swiglu), swiglu)


def supports(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
    pins: Pins,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del row, eps
    if pinned := [name for name in INSTEAD if pins.of(name)]:
        return f"{pinned[0]} is pinned"
    if str(x.dtype) not in DTYPES or not x.dtype == w.dtype == norms.dtype:
        return f"tokens, norms and weights are {x.dtype}, {norms.dtype} and {w.dtype}"
    if x.shape[0] != 1:
        return f"there are {x.shape[0]} tokens, not one"
    if parts is None or parts.size // x.size > MOST_PARTS:
        return f"there are no parts to add, or more than {MOST_PARTS}"
    sizes = sizes_of(x, w, swiglu=swiglu)
    if sizes.inner % (TILES * COLUMNS) or sizes.inner > WIDEST or sizes.outer % COLUMNS:
        return (
            f"{sizes.inner} components are not a multiple of {TILES * COLUMNS} up to {WIDEST}, "
            f"or {sizes.outer} columns not of {COLUMNS}"
        )
    return not_hopper()


def results(
    x: jax.Array,  # [T, D]
    parts: jax.Array,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a call returns, as shapes."""
    del parts, norms, row, eps
    outer = sizes_of(x, w, swiglu=swiglu).outer
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, outer), x.dtype)


def choose(sizes: Sizes) -> Launch:
    """Enough bytes on their way while the norm is made. Timed on an H200 with Qwen3-4B.

    Two programs fit on a multiprocessor: of this kernel where it has more programs than there are
    multiprocessors, else one of it and one of the kernel that comes next.
    """
    room = min(SHARED_BYTES // 2 - ROWS * sizes.inner * ITEM_BYTES, BYTES)
    more = sizes.outer // COLUMNS > current_device().multiprocessors
    block_k = COLUMNS if more else 2 * COLUMNS
    step = block_k * COLUMNS * ITEM_BYTES * (1 + sizes.swiglu)
    return Launch(block_k, room // step)
