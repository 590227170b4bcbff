"""A mixture of attention heads, on the kernels of attention. Parameters of ``RoutedAttention``:

qkv    [D, (E + 2) * K * H]: queries of each expert, keys, values
head_router [D, E]
o      [E * K * H, D]: of each expert    o_bias [D]

Queries of all experts are computed, and those of the chosen ones kept; outputs of the others are 0.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend
from jaxinfer.nn.mixers.routed_spec import RoutedAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight


class RoutedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: RoutedAttentionConfig

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
        qkv, stream, h = linear(stream, weight(self, "qkv"), ctx, norm=norm, keep=True)
        logits = linear(h, weight(self, "head_router"), ctx).y.astype(jnp.float32)
        best, experts = jax.lax.top_k(logits, c.chosen)  # [T, k]
        weights = jax.nn.softmax(best, axis=-1)
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        queries, keys_and_values = jnp.split(heads, (c.count * c.num_kv_heads,), axis=1)
        queries = queries.reshape(len(qkv), c.count, c.num_kv_heads, c.head_dim)
        queries = jnp.take_along_axis(queries, experts[:, :, None, None], axis=1)
        # the queries of a KV head are adjacent
        queries = queries.swapaxes(1, 2).reshape(len(qkv), -1, c.head_dim)
        out, state = attend(
            jnp.concatenate([queries, keys_and_values], axis=1),
            state,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=None,
            only=only,
        )
        out, x = ctx.at("z", out), stream.x
        if only is not None:
            x, experts, weights = stream.take(only), experts[only], take_rows(weights, only)
        out = out.reshape(len(out), c.num_kv_heads, c.chosen, c.head_dim)
        out = out * weights[:, None, :, None].astype(out.dtype)
        own = jax.nn.one_hot(experts, c.count, dtype=out.dtype)  # [T, k, E]
        out = jnp.einsum("tkch,tce->tekh", out, own).reshape(len(out), -1)
        bias = param(self, "o_bias")
        return x, block_output(out, weight(self, "o"), ctx, bias=bias), state
