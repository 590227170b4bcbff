"""skinny_gemm in plain XLA: for any number of tokens; every result is rounded to the dtype."""

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
    del split  # XLA chooses split-K itself and returns the sum
    # By default XLA rounds float32 to TF32 for the tensor cores of a GPU.
    out = jnp.matmul(x, w, precision="highest" if x.dtype == jnp.float32 else None)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * up
    return out
