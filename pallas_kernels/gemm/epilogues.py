"""Epilogues of GEMMs: activations of accumulators, and results from registers to global memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any

GELU_FACTOR, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SiLU of the gate times the up (Shazeer, 2020, arXiv:2002.05202)."""
    return gate / (1.0 + jnp.exp(-gate)) * up


def load_bias(bias: Ref, columns: Any) -> jax.Array | None:  # [columns]
    """A bias' slice in registers, as a result [columns, tokens] needs it; None if there is none.

    It is a weight: it may be read before earlier kernels have ended.
    """
    if bias is None:
        return None
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(bias.at[columns], layout=layout, optimized=False)


def plus_bias(result: jax.Array, bias: jax.Array | None) -> jax.Array:  # float32[columns, tokens]
    """The result plus each column's bias, if there is one."""
    if bias is None:
        return result
    return result + lax.broadcast_in_dim(bias.astype(jnp.float32), result.shape, [0])


def times_sigmoid(x: jax.Array, logit: jax.Array) -> jax.Array:
    """The sigmoid of a logit times ``x``.

    The square of a reciprocal root is cheaper than a division, which is several instructions.
    """
    root = lax.rsqrt(1.0 + jnp.exp(-logit))
    return x * root * root


def gelu_logit(gate: jax.Array) -> jax.Array:
    """The logit whose sigmoid times the gate is GELU(gate), with its approximation by tanh.

    (1 + tanh(z)) / 2 is the sigmoid of 2 z, and z is sqrt(2 / pi) * (gate + 0.044715 * gate ** 3)
    (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
    """
    return gate * (GELU_FACTOR + GELU_FACTOR * GELU_CUBIC * (gate * gate))


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """GELU of the gate, with its approximation by tanh, times the up."""
    return times_sigmoid(gate * up, gelu_logit(gate))


def swiglu_of_many(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``swiglu`` without a division."""
    return times_sigmoid(gate * up, gate)


def transposed(result: jax.Array, dtype: Any) -> jax.Array:
    """A result [columns, tokens] in a layout of which a register holds two adjacent columns of a
    token instead of two tokens.
    """
    return plgpu.layout_cast(result.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def write_columns(out: Ref, tokens: Any, columns: Any, result: jax.Array) -> None:
    """Write a result [columns, tokens] to slices of ``out``, [T, O]."""
    out.at[tokens, columns].transpose((1, 0))[...] = transposed(result, out.dtype)


def write_rows(
    out: Ref,
    num_tokens: int,
    columns: Any,
    result: jax.Array,  # [columns, tokens]
    places: Sequence[int] | None = None,
) -> None:
    """Write the first few tokens of a result one by one; ``places`` are their columns of it."""
    index = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    for i in range(num_tokens):
        place = i if places is None else places[i]
        row = jnp.where(index == place, result, 0.0).sum(axis=1)
        out.at[i, columns][...] = row.astype(out.dtype)
