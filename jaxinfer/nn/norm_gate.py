"""A gate of what a norm returns, made of two small matrices (A.X K2)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Norm, Stream, linear, normalised
from jaxinfer.nn.weight import weight


def gated_norm(
    module: nn.Module, name: str, stream: Stream, norm: Norm, ctx: StepContext
) -> tuple[Stream, jax.Array]:  # and [T, D]
    """The stream with its delta added, and its norm times the sigmoid of a projection of it.

    The parameters are ``name``_in [D, R] and ``name``_out [R, D], with a SiLU between them.
    """
    stream, h = normalised(stream, norm, ctx)
    inner = jax.nn.silu(linear(h, weight(module, f"{name}_in"), ctx).y)
    gates = linear(inner, weight(module, f"{name}_out"), ctx).y
    by = jax.nn.sigmoid(gates.astype(jnp.float32))
    return stream, (h.astype(jnp.float32) * by).astype(h.dtype)
