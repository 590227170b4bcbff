"""Attention to the keys and values that an earlier layer has written in the same step.

Parameters of ``SharedAttention``:

    q [D, N * H]   q_bias [N * H] with qkv_bias   q_norm [1, H] with a qk_norm of each head
    o [N * H, D]   o_bias [D]     with o_bias
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Angles, PlainOutput, StepContext
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import dense_attention, output, pages_of, prefill
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.append_decode.api import DecodeArgs, append_decode
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
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``Attention``; ``state`` is that of the other layer, in the dense form its keys and
        values [T, K, H].
        """
        c = self.config.attention
        assert state is not None, "an earlier layer has the keys and values"
        bias = param(self, "q_bias") if c.qkv_bias else None
        q, stream, _ = linear(stream, weight(self, "q"), ctx, norm=norm, bias=bias)
        q = q.reshape(-1, c.num_heads, c.head_dim)
        angles = ctx.angles[0] if ctx.angles else None
        rotation = Rotation(
            param(self, "q_norm") if c.qk_norm == "head" else None, norm.eps, angles
        )
        if ctx.rows is None:
            q, k, v = ctx.at("q", rotation.of(q, slice(None))), state["k"], state["v"]
            out = dense_attention(q, k, v, ctx, c.scale, c.window)
            out = out if only is None else out[only]
        else:
            out = attend_to_pages(q, rotation, state, ctx, c, only)
        return *output(self, c, stream, out, ctx, only), state


class Rotation(NamedTuple):
    """The norm and the rotation of queries before they attend."""

    norm: jax.Array | None  # [1, H]
    eps: float
    angles: Angles | None

    def of(self, q: jax.Array, tokens: slice) -> jax.Array:  # [T, N, H]
        """Queries of these tokens, normalised and rotated."""
        if self.norm is not None:
            q = rms_norm(q, self.norm[0], self.eps)
        return q if self.angles is None else rotate(q, *self.angles.take(tokens))


def attend_to_pages(
    q: jax.Array,  # [T, N, H]
    rotation: Rotation,
    state: LayerArrays,
    ctx: StepContext,
    config: AttentionConfig,
    only: jax.Array | None,  # int32[B]
) -> jax.Array:  # [T, N, H], or with only [B, N, H]
    """Attention of queries that are not rotated over pages; nothing is written."""
    d = ctx.num_decodes
    if only is not None:
        return _single_tokens(q[only], rotation, only, state, ctx, config)
    parts = [_single_tokens(q[:d], rotation, slice(d), state, ctx, config)] if d else []
    if d < len(q):
        prompts = rotation.of(q[d:], slice(d, None))
        parts.append(prefill(prompts, state, ctx, scale=config.scale, window=config.window))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _single_tokens(
    q: jax.Array,  # [rows, N, H]
    rotation: Rotation,
    tokens: jax.Array | slice,  # of ``q`` in the step
    state: LayerArrays,
    ctx: StepContext,
    config: AttentionConfig,
) -> jax.Array:  # [rows, N, H]
    """Attention of the last token of each of the first rows; zeros for rows without context."""
    rows, pages = len(q), ctx.pages[0]
    if rotation.angles is None:  # the kernels have no norm without a rotation
        q, rotation = rotation.of(q, slice(None)), rotation._replace(norm=None)
    cos, sin = (None, None) if rotation.angles is None else rotation.angles.take(tokens)
    args = DecodeArgs(
        qkv=q,
        cos=cos,
        sin=sin,
        qk_norms=rotation.norm,
        **pages_of(state),
        page_table=pages.page_table[:rows],
        seq_lens=pages.seq_lens[:rows],
        arrivals=ctx.arrivals if rows == ctx.num_decodes else None,
        scale=config.scale,
        eps=rotation.eps,
        window=config.window,
        appends=False,
    )
    return append_decode(args, ctx.pinned("append_decode"))[0]
