"""quantised_gemm in plain XLA, for any number of tokens.

The matrix is dequantised at each call, rounded to the tokens' dtype and multiplied. Every result is
rounded to that dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantised import Quantised, dequantised


def quantised_gemm(
    x: jax.Array,  # [T, K]
    values: jax.Array,  # [O, K] or uint8[O, K / 2]; with swiglu [2 * O, ...]: gate, up
    scales: jax.Array,  # [O, G]
    zeros: jax.Array | None,  # uint8[O, G]
    offsets: jax.Array | None,  # [O, G]
    supers: jax.Array | None,  # [O, S, 1 or 2]
    *,
    kind: str,
    swiglu: bool,
    split: bool,
    wide: bool,
) -> jax.Array:  # [T, O]
    """See ``quantised_gemm.api``."""
    del split  # XLA chooses split-K itself and returns the sum
    w = dequantised(Quantised(kind, values, scales, zeros, offsets, supers)).astype(x.dtype)
    # By default XLA rounds float32 to TF32 for the tensor cores of a GPU.
    precision = "highest" if x.dtype == jnp.float32 else None
    dtype = jnp.float32 if wide else x.dtype
    out = jnp.matmul(x, w.T, precision=precision, preferred_element_type=dtype)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * up
    return out
