"""norm_gemm as two ops, one after the other: definition, plain XLA, and each op's best kernel.

The arrays of a quantised matrix follow one another; a dense one has no factors, and its kind is
None.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.arrangements import of_either_order
from pallas_kernels.pins import Pins
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm import ref as quantised_ref
from pallas_kernels.quantised_gemm import xla as quantised_xla
from pallas_kernels.quantised_gemm.api import quantised_gemm
from pallas_kernels.quantised_gemm.fp8 import tokens as fp8_tokens
from pallas_kernels.residual_norm import ref as norm_ref
from pallas_kernels.residual_norm import xla as norm_xla
from pallas_kernels.residual_norm.api import NormArgs, residual_norm
from pallas_kernels.skinny_gemm import ref as gemm_ref
from pallas_kernels.skinny_gemm import xla as gemm_xla
from pallas_kernels.skinny_gemm.api import skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm


def reference(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    *w: Any,  # [D, O], or the arrays of a quantised matrix; with swiglu of 2 * O outputs
    row: int,
    eps: float,
    swiglu: bool,
    kind: str | None,
    pins: Pins,
) -> tuple[jax.Array, jax.Array]:  # [T, D], [T, O]
    """The definition of norm_gemm: the definitions of both ops."""
    del pins
    norm = NormArgs(x=x, partials=partials, weights=norms, row=row, eps=eps)
    total, normed = norm_ref.residual_norm(norm)
    if kind is None:
        return total, gemm_ref.skinny_gemm(normed, *w, swiglu=swiglu, split=False)
    gemm = of_either_order(quantised_ref.quantised_gemm)
    return total, gemm(normed, *w, kind=kind, swiglu=swiglu, split=False, wide=False)


def reference_fp8(
    x: jax.Array,  # [1, D]
    partials: jax.Array,  # [1, D] in x's dtype, or float32[S, 1, D]
    norms: jax.Array,  # [W, D]
    *w: Any,  # values, scales, and None three times
    row: int,
    eps: float,
    swiglu: bool,
    kind: str,
    pins: Pins,
) -> tuple[jax.Array, jax.Array]:  # [1, D], [1, O]
    """The definition where the normed token is quantised, too."""
    del pins
    norm = NormArgs(x=x, partials=partials, weights=norms, row=row, eps=eps)
    total, normed = norm_ref.residual_norm(norm)
    return total, fp8_tokens.quantised_gemm(normed, *w, kind=kind, swiglu=swiglu, split=False)


def plain_xla(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    *w: Any,  # [D, O], or the arrays of a quantised matrix; with swiglu of 2 * O outputs
    row: int,
    eps: float,
    swiglu: bool,
    kind: str | None,
    pins: Pins,
) -> tuple[jax.Array, jax.Array]:  # [T, D], [T, O]
    """Both ops in plain XLA; supports differentiation and vmap."""
    del pins
    norm = NormArgs(x=x, partials=partials, weights=norms, row=row, eps=eps)
    total, normed = norm_xla.residual_norm(norm)
    if kind is None:
        return total, gemm_xla.skinny_gemm(normed, *w, swiglu=swiglu, split=False)
    gemm = of_either_order(quantised_xla.quantised_gemm)
    return total, gemm(normed, *w, kind=kind, swiglu=swiglu, split=False, wide=False)


def unfused(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    *w: Any,  # [D, O], or the arrays of a quantised matrix; with swiglu of 2 * O outputs
    row: int,
    eps: float,
    swiglu: bool,
    kind: str | None,
    pins: Pins,
) -> tuple[jax.Array, jax.Array]:  # [T, D], [T, O]
    """Each op in the implementation that ``pins`` or ``registry.select`` chooses."""
    norm = NormArgs(x=x, partials=partials, weights=norms, row=row, eps=eps)
    total, normed = residual_norm(norm, pins.of("residual_norm"))
    if kind is not None:
        matrix = Quantised(kind, *w)
        return total, quantised_gemm(normed, matrix, swiglu=swiglu, impl=pins.of("quantised_gemm"))
    if swiglu:
        return total, swiglu_gemm(normed, *w, impl=pins.of("swiglu_gemm"))
    return total, skinny_gemm(normed, *w, impl=pins.of("skinny_gemm"))
