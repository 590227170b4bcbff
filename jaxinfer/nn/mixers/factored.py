"""Attention whose queries have a latent, on the kernels of attention. Parameters of
``FactoredAttention``, with latents of width Q:

    q_kv [D, Q + 2H]: the latent, the key and the value of all heads
    q_norm [Q]    q_b [Q, N * H]    o [N * H, D]
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, output
from jaxinfer.nn.mixers.factored_spec import FactoredAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm


class FactoredAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: FactoredAttentionConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``mixers.attention.Attention``."""
        own, c = self.config, self.config.attention
        both, stream, _ = linear(stream, weight(self, "q_kv"), ctx, norm=norm)
        latent, keys_and_values = jnp.split(both, (own.query_rank,), axis=1)
        fixed = ctx.pins.invariant
        latent = rms_norm(latent, param(self, "q_norm"), own.norm_eps, fixed=fixed)
        q = linear(latent, weight(self, "q_b"), ctx).y
        heads = jnp.concatenate([q, keys_and_values], axis=1)
        out, state = attend(
            heads.reshape(len(heads), -1, c.head_dim),
            state,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            only=only,
        )
        return *output(self, c, stream, out, ctx, only), state
