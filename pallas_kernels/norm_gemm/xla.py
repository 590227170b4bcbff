"""norm_gemm in plain XLA; differentiates and vmaps."""

from __future__ import annotations

import jax

from pallas_kernels.pins import Pins
from pallas_kernels.residual_norm import xla as norm
from pallas_kernels.skinny_gemm import xla as product


def norm_gemm(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
    pins: Pins,
) -> tuple[jax.Array, jax.Array]:  # [T, D], [T, O]
    """See ``norm_gemm.api``."""
    del pins
    total, normed = norm.residual_norm(x, parts, norms, row=row, eps=eps)
    return total, product.skinny_gemm(normed, w, swiglu=swiglu, split=False)
