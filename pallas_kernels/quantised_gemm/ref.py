"""The definition of quantised_gemm: dequantised and computed in float32, rounded once."""

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
    del split  # partials are defined by their sum
    w = dequantised(Quantised(kind, values, scales, zeros, offsets, supers))
    out = jnp.matmul(jnp.asarray(x, jnp.float32), w.T, precision="highest")
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = gate / (1.0 + jnp.exp(-gate)) * up
    return out if wide else out.astype(x.dtype)
