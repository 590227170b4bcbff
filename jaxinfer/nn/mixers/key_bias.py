"""Attention whose keys have a bias of scores, on the kernels of attention.

The bias of key s in KV head i is exp(rate_i softplus(b_i)) of a projection b of the token's values
(dynamic mask attention of Doge, without its choice of keys in contexts that are longer than the
model's). Parameters of ``KeyBiasAttention`` are those of ``Attention`` with norms of heads, and

    key_bias [K * H, K]    key_bias_bias [K] with qkv_bias    rates [K]
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, output
from jaxinfer.nn.mixers.key_bias_spec import KeyBiasConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import split_and_rotate


class KeyBiasAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: KeyBiasConfig

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
        c = self.config.attention
        bias = param(self, "qkv_bias") if c.qkv_bias else None
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm, bias=bias)
        heads, k = qkv.reshape(len(qkv), -1, c.head_dim), c.num_kv_heads
        norms = param(self, "qk_norms")
        q, keys, v = split_and_rotate(heads, *ctx.angles[0], norms, k, norm.eps)
        made = (v.reshape(len(v), -1) @ param(self, "key_bias")).astype(jnp.float32)
        if c.qkv_bias:
            made = made + param(self, "key_bias_bias").astype(jnp.float32)
        rates = param(self, "rates").astype(jnp.float32)
        biases = jnp.exp(rates * jax.nn.softplus(made)) / c.scale  # [T, K]
        more = self.config.wide.head_dim - c.head_dim - 1
        ones = jnp.ones((*q.shape[:2], 1), q.dtype)
        none = jnp.zeros((*v.shape[:2], 1), v.dtype)
        parts = ((q, ones), (keys, biases[:, :, None].astype(keys.dtype)), (v, none))
        wide = [
            jnp.pad(jnp.concatenate(both, axis=2), ((0, 0), (0, 0), (0, more))) for both in parts
        ]
        out, state = attend(
            jnp.concatenate(wide, axis=1),
            state,
            replace(ctx, angles=()),
            num_kv_heads=k,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            only=only,
        )
        return *output(self, c, stream, out, ctx, only), state
