"""The dense feed-forward network, gated (SwiGLU, GeGLU, ...) or plain.

Owns: ``FeedForward``. Parameters:

    gated  gate_up [D, 2F]: gate, up   gate_up_bias [2F]   down [F, D]   down_bias [D]
    plain  up      [D, F]              up_bias      [F]    down [F, D]   down_bias [D]
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.activations import ACTIVATIONS
from jaxinfer.nn.context import StepContext
from jaxinfer.nn.decoder_config import FeedForwardConfig
from jaxinfer.nn.linear import Norm, Stream, linear, linear_of_norm, swiglu_mlp, weight

_ZEROS = nn.initializers.zeros


class FeedForward(nn.Module):
    """The feed-forward network of a layer, with the norm before it."""

    config: FeedForwardConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, jax.Array]:  # [T, D], and [T, D] or float32[S, T, D]
        """The stream with its delta added, and the network's output."""
        c, d, dtype = self.config, stream.x.shape[1], stream.x.dtype
        name, columns = ("gate_up", 2 * c.width) if c.gated else ("up", c.width)
        w = weight(self, name, (d, columns), dtype)
        bias = self.param(f"{name}_bias", _ZEROS, (columns,), dtype) if c.bias else None
        swiglu = c.gated and c.activation == "silu" and not c.bias  # in one kernel
        swiglu = swiglu and not ctx.uses("mlp_pre", "mlp_linear")
        down = weight(self, "down", (c.width, d), dtype)
        if swiglu and not ctx.uses("mlp_post"):
            stream, y = swiglu_mlp(stream, norm, w, down, ctx)
            return stream.x, y
        stream, hidden = linear_of_norm(stream, norm, w, ctx, bias=bias, swiglu=swiglu)
        activation = ACTIVATIONS[c.activation]
        if c.gated and not swiglu:
            gate, up = jnp.split(hidden, 2, axis=-1)
            hidden = activation(ctx.at("mlp_pre", gate)) * ctx.at("mlp_linear", up)
        elif not c.gated:
            hidden = activation(ctx.at("mlp_pre", hidden))
        hidden = ctx.at("mlp_post", hidden)
        bias = self.param("down_bias", _ZEROS, (d,), dtype) if c.bias else None
        return stream.x, linear(hidden, down, ctx, bias=bias, partial=True)
