"""The network of a normalised transformer: see ``NGPTFeedForwardConfig``.

Parameters are those of a gated ``FeedForward``, and ``scales`` [2 * F]: of gates, of ups.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.ngpt import divided_unit
from jaxinfer.nn.ngpt_spec import NGPTFeedForwardConfig
from jaxinfer.nn.weight import param, weight


class NGPTFeedForward(nn.Module):
    """The feed-forward network of a layer."""

    config: NGPTFeedForwardConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, PlainOutput]:  # [T, D]
        """See ``FeedForward``."""
        hidden, stream, _ = linear(stream, weight(self, "gate_up"), ctx, norm=norm)
        scales = param(self, "scales").astype(jnp.float32) * self.config.factor
        scaled = (hidden.astype(jnp.float32) * scales).astype(hidden.dtype)
        gate, up = jnp.split(scaled, 2, axis=-1)
        gate, up = ctx.at("mlp_pre", gate), ctx.at("mlp_linear", up)
        hidden = ctx.at("mlp_post", jax.nn.silu(gate) * up)
        hidden = divided_unit(hidden, self.config.whole, ctx)
        return stream.x, block_output(hidden, weight(self, "down"), ctx)
