"""norm_gemm as two ops, each in the implementation that suits the call."""

from __future__ import annotations

import jax

from pallas_kernels.pins import Pins
from pallas_kernels.residual_norm.api import residual_norm
from pallas_kernels.skinny_gemm.api import skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm


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
    impl = pins.of("residual_norm")
    total, normed = residual_norm(x, parts, norms, row=row, eps=eps, impl=impl)
    if swiglu:
        return total, swiglu_gemm(normed, w, impl=pins.of("swiglu_gemm"))
    return total, skinny_gemm(normed, w, impl=pins.of("skinny_gemm"))
