"""Attention to the keys and values that an earlier layer has written in the same step.

Parameters of ``SharedAttention``:

    q [D, N * H]   q_bias [N * H] with qkv_bias   q_norm [1, H] with a qk_norm of each head
    o [N * H, D]   o_bias [D]     with o_bias
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import decode, dense_attention, output, prefill
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm, rotate


class SharedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: SharedAttentionConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        """See ``Attention``; ``state`` is that of the other layer, in the dense form its keys and
        values [T, K, H].
        """
        c = self.config.attention
        assert state is not None, "an earlier layer has the keys and values"
        bias = param(self, "q_bias") if c.qkv_bias else None
        q, stream, _ = linear(stream, weight(self, "q"), ctx, norm=norm, bias=bias)
        q = q.reshape(-1, c.num_heads, c.head_dim)
        if c.qk_norm == "head":
            q = rms_norm(q, param(self, "q_norm")[0], norm.eps)
        if ctx.angles:
            q = rotate(q, *ctx.angles[0])
        if ctx.rows is None:
            k, v = state["k"], state["v"]
            out = dense_attention(ctx.at("q", q), k, v, ctx, c.scale, c.window)
            out = out if only is None else out[only]
        else:
            out, state = _paged(q, state, ctx, c, only)
        return *output(self, c, stream, out, ctx, only), state


def _paged(
    q: jax.Array,  # [T, N, H]
    state: LayerArrays,
    ctx: StepContext,
    config: AttentionConfig,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, LayerArrays]:  # [T, N, H], or with only [B, N, H]
    """Attention over the pages of the other layer.

    The kernel for single tokens appends their keys and values, so it receives those that the pages
    already hold, and writes the same bits again.
    """
    static = {"scale": config.scale, "window": config.window}
    slots, d = ctx.pages[0].slot_mapping, ctx.num_decodes
    if only is not None:
        return decode(_with_stored(q[only], state, slots[only]), state, ctx, **static)
    parts: list[jax.Array] = []
    if d:
        out, state = decode(_with_stored(q[:d], state, slots[:d]), state, ctx, **static)
        parts.append(out)
    if d < len(q):
        parts.append(prefill(q[d:], state, ctx, **static))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0], state


def _with_stored(
    q: jax.Array,  # [B, N, H]
    state: LayerArrays,
    slots: jax.Array,  # int32[B]
) -> jax.Array:  # [B, N + 2K, H]
    """Queries with the stored keys and values of their tokens."""
    pools = (state["k"], state["v"])
    stored = [pool.reshape(-1, *pool.shape[2:])[slots].astype(q.dtype) for pool in pools]
    return jnp.concatenate([q, *stored], axis=1)
