"""Sizes of a call of skinny_gemm. Owns: ``Sizes``, ``ARRIVALS``. Must not know: launches."""

from __future__ import annotations

from typing import NamedTuple

import jax

ARRIVALS = 1024  # tiles of a result whose inner axis is cut, at most


class Sizes(NamedTuple):
    """What a choice may depend on: [T, I] @ [I, O], or [I, 2 * O] with ``swiglu``."""

    tokens: int
    inner: int
    outer: int
    norm: bool
    swiglu: bool
    dtype: str


def sizes_of(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]
    norm: jax.Array | None,  # [I]
    swiglu: bool,
) -> Sizes:
    """Of a call."""
    tokens, inner = x.shape
    outer = w.shape[1] // 2 if swiglu else w.shape[1]
    return Sizes(tokens, inner, outer, norm is not None, swiglu, str(x.dtype))
