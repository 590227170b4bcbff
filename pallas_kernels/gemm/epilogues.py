"""Epilogues of GEMMs: SwiGLU of accumulators, and results from registers to global memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SiLU of the gate times the up (Shazeer, 2020, arXiv:2002.05202)."""
    return gate / (1.0 + jnp.exp(-gate)) * up


def swiglu_of_many(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The square of a reciprocal root is cheaper than a division, which is several instructions."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * up * root * root


def transposed(result: jax.Array, dtype: Any) -> jax.Array:
    """A result [columns, tokens] in a layout of which a register holds two adjacent columns of a
    token instead of two tokens.
    """
    return plgpu.layout_cast(result.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def write_columns(out: Ref, tokens: Any, columns: Any, result: jax.Array) -> None:
    """Write a result [columns, tokens] to slices of ``out``, [T, O]."""
    out.at[tokens, columns].transpose((1, 0))[...] = transposed(result, out.dtype)


def write_rows(out: Ref, num_tokens: int, columns: Any, result: jax.Array) -> None:
    """Write the first few tokens of a result [columns, tokens], one by one."""
    index = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    for i in range(num_tokens):
        row = jnp.where(index == i, result, 0.0).sum(axis=1)
        out.at[i, columns][...] = row.astype(out.dtype)
