"""The definition of skinny_gemm: computed in float32, rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool,
    split: bool,
) -> jax.Array:  # [T, O]
    """See ``skinny_gemm.api``."""
    del split  # partials are defined by their sum
    x32, w32 = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    out = jnp.matmul(x32, w32, precision="highest")
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = gate / (1.0 + jnp.exp(-gate)) * up
    return out.astype(x.dtype)
