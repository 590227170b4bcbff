"""Attention of unit vectors, on the kernels of attention: see ``NGPTAttentionConfig``.

Parameters are those of ``Attention`` with gates, and those of all heads

    query_scale [N * H]   gate_scale [N * H]
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend
from jaxinfer.nn.ngpt import divided_unit, unit
from jaxinfer.nn.ngpt_spec import NGPTAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.numerics import split_and_rotate


class NGPTAttention(nn.Module):
    """The attention block of a layer."""

    config: NGPTAttentionConfig

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
        c = self.config
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm)
        gates, qkv = jnp.split(qkv, (c.num_heads * c.head_dim,), axis=1)
        heads, k = qkv.reshape(len(qkv), -1, c.head_dim), c.num_kv_heads
        qk, v = jnp.split(heads, (c.num_heads + k,), axis=1)
        heads = jnp.concatenate((unit(qk), v), axis=1)
        q, keys, v = split_and_rotate(heads, *ctx.angles[0], None, k, norm.eps)
        q = (q.astype(jnp.float32) * self._factors("query_scale", c.query_factor)).astype(q.dtype)
        out, state = attend(
            jnp.concatenate((q, keys, v), axis=1),
            state,
            replace(ctx, angles=()),
            num_kv_heads=k,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            only=only,
        )
        x = stream.x if only is None else stream.take(only)
        gates = gates if only is None else take_rows(gates, only)
        wide = gates.reshape(out.shape).astype(jnp.float32)
        by = jax.nn.sigmoid(wide * self._factors("gate_scale", c.gate_factor))
        out = (ctx.at("z", out).astype(jnp.float32) * by).astype(out.dtype)
        out = divided_unit(out.reshape(len(out), -1), c.width, ctx)
        return x, block_output(out, weight(self, "o"), ctx), state

    def _factors(self, name: str, factor: float) -> jax.Array:  # float32[N, H]
        """The squares of a parameter times a factor."""
        stored = param(self, name).astype(jnp.float32) * factor
        return jnp.square(stored).reshape(-1, self.config.head_dim)
