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
) -> jax.Array:  # [T, O]
    """See ``skinny_gemm.api``."""
    del arrivals  # XLA cuts products up by itself
    return _product(x, w, norm, residual, eps, swiglu)


@partial(jax.jit, static_argnames=("eps", "swiglu"))  # one trace serves every layer of a step
def _product(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    eps: float,
    swiglu: bool,
) -> jax.Array:  # [T, O]
    x = x if norm is None else rms_norm(x, norm, eps)
    # Left to itself XLA rounds float32 to 11 bits for the matrix units of a GPU.
    out = jnp.matmul(x, w, precision="highest" if x.dtype == jnp.float32 else None)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * up
    return out if residual is None else residual + out
