"""swiglu_gemm in plain XLA: a product, then a pass over it; each step rounded to the dtype."""

from __future__ import annotations

import jax

from pallas_kernels.skinny_gemm import xla


def swiglu_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> jax.Array:  # [T, O]
    """See ``swiglu_gemm.api``."""
    return xla.skinny_gemm(x, w, swiglu=True, split=False)
