"""The definition of swiglu_gemm: that of skinny_gemm, whatever the number of tokens."""

from __future__ import annotations

import jax

from pallas_kernels.skinny_gemm import ref


def swiglu_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> jax.Array:  # [T, O]
    """See ``swiglu_gemm.api``."""
    return ref.skinny_gemm(x, w, swiglu=True, split=False)
