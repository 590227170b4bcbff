"""Sizes of a call of skinny_gemm. Owns: ``Sizes``. Must not know: launches."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Sizes(NamedTuple):
    """What a choice may depend on: [T, I] @ [I, O], or [I, 2 * O] with ``swiglu``."""

    tokens: int
    inner: int
    outer: int
    swiglu: bool
    split: bool
    dtype: str


def sizes_of(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]
    *,
    swiglu: bool,
    split: bool,
) -> Sizes:
    """Of a call."""
    tokens, inner = x.shape
    outer = w.shape[1] // 2 if swiglu else w.shape[1]
    return Sizes(tokens, inner, outer, swiglu, split, str(x.dtype))
