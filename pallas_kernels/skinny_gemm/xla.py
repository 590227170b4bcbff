"""skinny_gemm in plain XLA: for any number of tokens, each step rounded to the dtype."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import rms_norm


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
    """See ``skinny_gemm.api``."""
    del arrivals  # XLA cuts products up by itself
    return _product(x, w, norm, residual, eps, swiglu, parts)


# One trace serves every layer of a step.
@partial(jax.jit, static_argnames=("eps", "swiglu", "parts"))
def _product(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    eps: float,
    swiglu: bool,
    parts: int,
) -> jax.Array:  # [T, O], or float32[parts, T, O]
    x = x if norm is None else rms_norm(x, norm, eps)
    # Left to itself XLA rounds float32 to 11 bits for the matrix units of a GPU.
    precision = "highest" if x.dtype == jnp.float32 else None
    if parts > 1:  # the whole product is the first of them
        out = jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)
        return jnp.zeros((parts, *out.shape), out.dtype).at[0].set(out)
    out = jnp.matmul(x, w, precision=precision)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * up
    return out if residual is None else residual + out
