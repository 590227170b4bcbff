"""Attention in a later pass through a decoder's layers: see ``looped_spec``.

Parameters of ``LoopedAttention`` are those of ``Attention``, and

    loop_gate [N, H]    loop_gate_bias [N]
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, dense_attention, output
from jaxinfer.nn.mixers.looped_spec import LoopedAttentionConfig
from jaxinfer.nn.mixers.shared import Rotation, attend_to_pages
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight


class LoopedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: LoopedAttentionConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``Attention``. ``state`` has the pages of both layers, in the dense form the keys and
        values [T, K, H] of the earlier one.
        """
        c = self.config.attention
        assert state is not None, "an earlier layer has keys and values"
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm)
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        q, is_dense = heads[:, : c.num_heads], ctx.rows is None
        own, new = attend(
            heads,
            None if is_dense else state,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=self.config.window,
            only=only,
        )
        rotation = Rotation(None, norm.eps, ctx.angles[0])
        turned = rotation.of(q, slice(None))  # [T, N, H]
        if is_dense:
            earlier = dense_attention(
                turned, state["k"], state["v"], replace(ctx, points=None), c.scale, None
            )
            earlier = earlier if only is None else earlier[only]
        else:
            assert new is not None
            of_other = replace(ctx, pages=ctx.pages[1:])
            earlier = attend_to_pages(q, rotation, new, of_other, c, only)
        gate = self._gate(turned if only is None else turned[only])
        out = earlier * gate + own * (1 - gate)
        return *output(self, c, stream, out, ctx, only), new

    def _gate(self, q: jax.Array) -> jax.Array:  # [T, N, H] -> [T, N, 1]
        """The share of attention to the earlier layer's keys."""
        scores = jnp.einsum(
            "tnh,nh->tn", q, param(self, "loop_gate"), preferred_element_type=jnp.float32
        )
        scores = scores + param(self, "loop_gate_bias").astype(jnp.float32)
        return jax.nn.sigmoid(scores).astype(q.dtype)[:, :, None]
