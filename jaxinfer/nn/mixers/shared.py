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
from jaxinfer.nn.mixers.attention import dense_attention, output, prefill
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm, rotate
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill


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
            out = _paged(q, state, ctx, c, only)
        return *output(self, c, stream, out, ctx, only), state


def _paged(
    q: jax.Array,  # [T, N, H]
    state: LayerArrays,
    ctx: StepContext,
    config: AttentionConfig,
    only: jax.Array | None,  # int32[B]
) -> jax.Array:  # [T, N, H], or with only [B, N, H]
    """Attention over the pages of the other layer.

    Nothing is written: a write after a read makes XLA copy the pools. So single tokens attend as
    prompts of one token, and not in ``append_decode``.
    """
    d = ctx.num_decodes
    if only is not None:
        return _single_tokens(q[only], state, ctx, config)
    parts = [_single_tokens(q[:d], state, ctx, config)] if d else []
    if d < len(q):
        parts.append(prefill(q[d:], state, ctx, scale=config.scale, window=config.window))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _single_tokens(
    q: jax.Array,  # [rows, N, H]
    state: LayerArrays,
    ctx: StepContext,
    config: AttentionConfig,
) -> jax.Array:  # [rows, N, H]
    """Attention of the last token of each of the first rows; zeros for rows without context."""
    rows, pages = len(q), ctx.pages[0]
    lens = pages.seq_lens[:rows]
    is_real = lens > 0
    args = PrefillArgs(
        q=q,
        k_pages=state["k"],
        v_pages=state["v"],
        # a prompt has a context: that of padding is the first entry of page 0
        page_table=jnp.where(is_real[:, None], pages.page_table[:rows], 0),
        seq_lens=jnp.maximum(lens, 1),
        query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
        scale=config.scale,
        window=config.window,
    )
    out = paged_prefill(args, ctx.pinned("paged_prefill"))
    return jnp.where(is_real[:, None, None], out, 0)
