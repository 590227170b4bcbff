"""The definition of skinny_gemm: step by step in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    arrivals: jax.Ref | None,  # int32[>= ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
    parts: int,
) -> jax.Array:  # [T, O], or float32[parts, T, O]
    """Normalised tokens are rounded to their dtype before the product, as models do."""
    del arrivals
    dtype = x.dtype
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    if norm is not None:
        length = jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)
        x = (x / length * jnp.asarray(norm, jnp.float32)).astype(dtype).astype(jnp.float32)
    product = jnp.matmul(x, w, precision="highest")
    if swiglu:
        gate, up = jnp.split(product, 2, axis=1)
        product = gate / (1.0 + jnp.exp(-gate)) * up
    if residual is not None:
        product += jnp.asarray(residual, jnp.float32)
    if parts > 1:
        return jnp.zeros((parts, *product.shape), jnp.float32).at[0].set(product)
    return product.astype(dtype)
