"""residual_norm in plain XLA; supports differentiation and vmap."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.numerics import add_partials, rms_norm


@partial(jax.jit, static_argnames=("row", "eps"))  # one trace serves every layer of a step
def residual_norm(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    x = x if partials is None else add_partials(x, partials)
    return x, rms_norm(x, weights[row], eps)
