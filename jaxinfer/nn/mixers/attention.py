"""Grouped-query attention: queries, keys and values from one GEMM, rope, paged or dense.

``attend`` computes a token's output from its heads: over pages when serving, over the sequence
itself in the dense form. Parameters of ``Attention``:

    qkv [D, (N + 2K) * H]   qkv_bias [(N + 2K) * H] with qkv_bias
      with a gate [D, (2N + 2K) * H]: the gates of the heads are first
    head_gate [D, N] with gates of whole heads
      with values that are keys [D, (N + K) * H]
    o   [N * H, D]          o_bias   [D]            with o_bias
    qk_norms [2, H] with a qk_norm of each head, rotated or not, with weights, [(N + K) * H] with
      one of all heads; with LayerNorms of heads [4, H]: weight and bias of queries, of keys; or
      [(N + K) * H], and qk_norm_biases like it
    sinks [N] with sinks    o_norm [N * H] with a norm of the outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Angles, PlainOutput, StepContext
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.linear import Norm, Stream, block_output, divided_rms_norm, linear
from jaxinfer.nn.mixers import heads as on_heads
from jaxinfer.nn.mixers.chunks import last_in_chunks, prompts_in_chunks
from jaxinfer.nn.state import Chunk, LayerArrays, used_chunk
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.append_decode.api import DecodeArgs, append_decode
from pallas_kernels.kv_append.api import KvAppendArgs, kv_append
from pallas_kernels.lib.numerics import (
    Values,
    rms_norm,
    split_and_rotate,
    split_heads,
    with_values,
)
from pallas_kernels.lib.softmax import biased, capped
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill
from pallas_kernels.qk_rope_append.api import RopeAppendArgs, qk_rope_append


class QKNorm(NamedTuple):
    """An RMS norm over H of each query and key, before rope."""

    weights: jax.Array | None  # [2, H]: of queries, of keys; None without the norm
    eps: float  # static


class _Norms(NamedTuple):
    """The arguments of every kernel that normalises heads."""

    qk_norm: QKNorm
    values: Values


class HeadTerms(NamedTuple):
    """Terms of the scores of each head: sinks and the slopes of ALiBi. Sinks with values are those
    of each token.
    """

    sinks: jax.Array | None = None  # [N], with values [T, N]
    slopes: jax.Array | None = None  # float32[N]: of ALiBi
    root: bool = False  # see ``Alibi``
    sink_values: jax.Array | None = None  # [T, N, H]

    def take(self, tokens: jax.Array | slice) -> HeadTerms:
        """The terms of a subset of the tokens."""
        if self.sinks is None or self.sink_values is None:
            return self
        return self._replace(sinks=self.sinks[tokens], sink_values=self.sink_values[tokens])


_NO_TERMS = HeadTerms()


class Attention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: AttentionConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """The stream [T, D] with its delta added, attention's output, and the layer's new state.

        With ``only``, stream and output have only these tokens: the last of each row, in the last
        layer, whose other outputs are not used. The keys and values of all tokens are appended.
        """
        c = self.config
        bias = param(self, "qkv_bias") if c.qkv_bias else None
        if c.gate and not c.gate_bias and bias is not None:
            bias = jnp.pad(bias, (c.num_heads * c.head_dim, 0))
        w = weight(self, "qkv")
        qkv, stream, h = linear(stream, w, ctx, norm=norm, bias=bias, keep=c.head_gate)
        gates = linear(h, weight(self, "head_gate"), ctx).y if c.head_gate else None
        if c.gate:
            gates, qkv = jnp.split(qkv, (c.num_heads * c.head_dim,), axis=1)
        norms = None
        if c.qk_norm in ("plain", "rotated_plain"):
            norms = jnp.ones((2, c.head_dim), qkv.dtype)
        elif c.qk_norm is not None:
            norms = param(self, "qk_norms")
        if norms is not None and c.qk_norm == "all_heads":
            qkv, norms = on_heads.norm_all(qkv, norms, c, norm.eps, ctx), None
        if c.clip is not None:
            qkv = jnp.clip(qkv, -c.clip, c.clip)
        if c.own_value_dim is not None or c.value_scale != 1:
            qkv = on_heads.widened(qkv, c)
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        if c.growth is not None:
            heads = on_heads.grown(heads, c.growth, c.num_kv_heads, ctx.positions)
        if norms is not None and c.qk_norm in ("layer", "layers", "layers_bias"):
            biases = param(self, "qk_norm_biases") if c.qk_norm == "layers_bias" else None
            heads, norms = on_heads.layer_norms(heads, norms, biases, c, norm.eps, ctx), None
        if norms is not None and (c.rope is None or c.qk_norm not in ("head", "plain")):
            heads = on_heads.normalised(heads, norms, c, norm.eps, ctx)
            ctx, norms = replace(ctx, angles=()), None
        out, state = attend(
            heads,
            state,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(norms, norm.eps),
            scale=c.scale,
            window=c.window,
            chunk=used_chunk(c.chunk),
            cap=c.cap,
            values=c.values,
            terms=HeadTerms(
                param(self, "sinks") if c.sinks else None,
                c.alibi and c.alibi.own(c.num_heads, ctx.axis),
                root=c.alibi is not None and c.alibi.root,
            ),
            only=only,
        )
        if c.head_norm is not None:
            ones = jnp.ones(out.shape[2:], out.dtype)
            out = rms_norm(out, ones, c.head_norm, fixed=ctx.pins.invariant)
        if gates is not None:
            own = gates if only is None else take_rows(gates, only)
            out = on_heads.gated(out, own.reshape(*out.shape[:2], -1), c.gate_act)
        return *output(self, c, stream, out, ctx, only), state


def output(
    module: nn.Module,
    config: AttentionConfig,
    stream: Stream,
    out: jax.Array,  # [T, N, H]
    ctx: StepContext,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, PlainOutput]:  # [T, D]
    """The stream, and the projection of the heads' outputs; with ``only`` these have B tokens."""
    out = ctx.at("z", out[..., : config.value_dim])
    x = stream.x if only is None else stream.take(only)
    bias = param(module, "o_bias") if config.o_bias else None
    out = out.reshape(len(out), -1)
    if config.out_norm is not None:
        out = divided_rms_norm(out, param(module, "o_norm"), config.out_norm, ctx)
    return x, block_output(out, weight(module, "o"), ctx, bias=bias)


def attend(
    qkv: jax.Array,  # [T, N + 2K, H]: heads of queries, keys and values; see ``Values``
    state: LayerArrays | None,
    ctx: StepContext,
    *,
    num_kv_heads: int,
    qk_norm: QKNorm,
    scale: float,
    window: int | None,
    values: Values = "projected",
    terms: HeadTerms = _NO_TERMS,
    only: jax.Array | None = None,  # int32[B]
    cap: float | None = None,
    chunk: Chunk | None = None,
    chosen: jax.Array | None = None,  # bool[K, T, T]: see ``dense_attention``
) -> tuple[jax.Array, LayerArrays | None]:  # [T, N, H], or with only [B, N, H]
    """Append this step's keys and values to the pages and attend over them.

    Queries, keys and values are in one array, so that one kernel can do all work before attention.
    Without state, a whole sequence attends to itself.
    """
    angles = ctx.angles[0] if ctx.angles else None
    if state is None or angles is None:  # the kernels that rotate make the values, too
        qkv = with_values(qkv, num_kv_heads, values, qk_norm.eps)
        values = "projected"
    if state is None:
        reach = window if chunk is None else chunk
        return _dense(qkv, ctx, qk_norm, num_kv_heads, scale, reach, terms, only, cap, chosen)
    pages, d = ctx.pages[0], ctx.num_decodes
    last = prompts = ctx
    if chunk is not None:
        page_size = state["k"].shape[1]
        last = last_in_chunks(ctx, chunk, page_size)
        prompts = prompts_in_chunks(ctx, chunk, page_size) if qkv.shape[0] > d else ctx
    static: dict[str, Any] = {"scale": scale, "window": window, "cap": cap}
    if qkv.shape[0] == d:
        return _decode(qkv, state, last, angles, qk_norm, values, terms, **static)
    # Append the keys and values of prompts before pages are read, as a write after a read makes XLA
    # copy the pools. (``append_decode`` writes and reads within one kernel.)
    slots, norms = pages.slot_mapping[d:], _Norms(qk_norm, values)
    own = None if angles is None else angles.take(slice(d, None))
    q, state = append(qkv[d:], state, slots, ctx, own, *norms)
    if only is not None:  # a decode of all rows, which appends their last tokens again
        angles = None if angles is None else angles.take(only)
        return _decode(qkv[only], state, last, angles, *norms, terms.take(only), **static)
    parts: list[jax.Array] = []
    if d:
        first = None if angles is None else angles.take(slice(d))
        own = terms.take(slice(d))
        out, state = _decode(qkv[:d], state, last, first, *norms, own, **static)
        parts.append(out)
    parts.append(prefill(q, state, prompts, terms.take(slice(d, None)), **static))
    return jnp.concatenate(parts) if d else parts[0], state


def pages_of(state: LayerArrays) -> dict[str, Any]:
    """The pages of keys and values, and their scales if they have 8 bits, as arguments of ops."""
    scales = {"k_scales": state.get("k_scale"), "v_scales": state.get("v_scale")}
    return {"k_pages": state["k"], "v_pages": state["v"], **scales}


def with_pools(pools: Sequence[jax.Array]) -> LayerArrays:
    """The state of the pools that an op returns."""
    return dict(zip(("k", "v", "k_scale", "v_scale"), pools, strict=False))


def prefill(
    q: jax.Array,  # [T, N, H]: of prompts
    state: LayerArrays,
    ctx: StepContext,
    terms: HeadTerms = _NO_TERMS,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:  # [T, N, H]
    """Attend for the tokens of prompts, whose keys and values are in the pages."""
    assert ctx.rows is not None
    pages, d = ctx.pages[0], ctx.num_decodes
    args = PrefillArgs(
        q=q,
        **pages_of(state),
        page_table=pages.page_table[d:],
        seq_lens=pages.seq_lens[d:],
        query_start_loc=ctx.rows.query_start_loc,
        sinks=terms.sinks,
        sink_values=terms.sink_values,
        slopes=terms.slopes,
        root=terms.root,
        scale=scale,
        window=window,
        cap=cap,
    )
    return paged_prefill(args, ctx.pinned("paged_prefill"))


def append(
    qkv: jax.Array,  # [T, N + 2K, H]
    state: LayerArrays,
    slots: jax.Array,  # int32[T]
    ctx: StepContext,
    angles: Angles | None,  # of these tokens
    qk_norm: QKNorm,
    values: Values = "projected",
) -> tuple[jax.Array, LayerArrays]:  # [T, N, H]
    """The queries of some tokens, and the state after appending their keys and values."""
    to = pages_of(state) | {"slot_mapping": slots}
    if angles is None:
        q, k, v = split_heads(qkv, state["k"].shape[2])
        return q, with_pools(kv_append(KvAppendArgs(k=k, v=v, **to), ctx.pinned("kv_append")))
    args = RopeAppendArgs(
        qkv=qkv,
        cos=angles.cos,
        sin=angles.sin,
        qk_norms=qk_norm.weights,
        **to,
        eps=qk_norm.eps,
        values=values,
    )
    q, *pools = qk_rope_append(args, ctx.pinned("qk_rope_append"))
    return q, with_pools(pools)


def _decode(
    qkv: jax.Array,  # [rows, N + 2K, H]
    state: LayerArrays,
    ctx: StepContext,
    angles: Angles | None,  # of these rows
    qk_norm: QKNorm,
    values: Values,
    terms: HeadTerms,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> tuple[jax.Array, LayerArrays]:  # [rows, N, H]
    """Append and attend for the first rows, one token each."""
    rows, pages = qkv.shape[0], ctx.pages[0]
    cos, sin, norms = (None, None, None) if angles is None else (*angles, qk_norm.weights)
    args = DecodeArgs(
        qkv=qkv,
        cos=cos,
        sin=sin,
        qk_norms=norms,
        **pages_of(state),
        page_table=pages.page_table[:rows],
        seq_lens=pages.seq_lens[:rows],
        arrivals=ctx.arrivals if rows == ctx.num_decodes else None,
        sinks=terms.sinks,
        sink_values=terms.sink_values,
        slopes=terms.slopes,
        root=terms.root,
        scale=scale,
        eps=0.0 if angles is None else qk_norm.eps,
        window=window,
        cap=cap,
        values=values,
    )
    out, *pools = append_decode(args, ctx.pinned("append_decode"))
    return out, with_pools(pools)


def _dense(
    qkv: jax.Array,  # [T, N + 2K, H]
    ctx: StepContext,
    qk_norm: QKNorm,
    num_kv_heads: int,
    scale: float,
    window: int | Chunk | None,
    terms: HeadTerms,
    only: jax.Array | None,  # int32[B]
    cap: float | None,
    chosen: jax.Array | None,  # bool[K, T, T]
) -> tuple[jax.Array, LayerArrays]:  # [T, N, H], or with only [B, N, H]
    """Attention of one whole sequence over itself, and its keys and values [T, K, H]."""
    if ctx.angles:
        cos, sin = ctx.angles[0]
        q, k, v = split_and_rotate(qkv, cos, sin, qk_norm.weights, num_kv_heads, qk_norm.eps)
    else:
        q, k, v = split_heads(qkv, num_kv_heads)
    q, k, v = ctx.at("q", q), ctx.at("k", k), ctx.at("v", v)
    out = dense_attention(q, k, v, ctx, scale, window, terms, cap, chosen)
    return out if only is None else out[only], {"k": k, "v": v}


def dense_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, V]
    ctx: StepContext,
    scale: float,
    window: int | Chunk | None,
    terms: HeadTerms = _NO_TERMS,
    cap: float | None = None,
    chosen: jax.Array | None = None,  # bool[K, T, T]
) -> jax.Array:  # [T, N, V]
    """Causal attention of one whole sequence over itself; supports gradients and vmap.

    The queries of a KV head attend to ``chosen`` keys alone.
    """
    t, n, h = q.shape
    grouped = q.reshape(t, k.shape[1], n // k.shape[1], h)
    scores = jnp.einsum("TKGH,SKH->KGTS", grouped, k, preferred_element_type=jnp.float32)
    distance = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]  # [T, S]
    visible = distance >= 0
    if isinstance(window, Chunk):
        of_token = jnp.arange(t) // window.size
        visible &= of_token[:, None] - of_token <= window.back
    elif window is not None:
        visible &= distance < window
    if chosen is not None:
        visible &= chosen[:, None]
    slopes = None if terms.slopes is None else terms.slopes.reshape(*scores.shape[:2], 1, 1)
    scores = biased(capped(scores * scale, cap), slopes, distance, root=terms.root)
    scores = jnp.where(visible, scores, -jnp.inf)
    by_head = ctx.at("scores", scores.reshape(n, t, t))
    if terms.sinks is not None:
        beside = jnp.broadcast_to(terms.sinks.astype(by_head.dtype), (t, n)).T[..., None]
        by_head = jnp.concatenate([by_head, beside], axis=-1)
    both = jax.nn.softmax(by_head, axis=-1)
    weights = ctx.at("pattern", both[..., :t].astype(v.dtype))
    out = jnp.einsum("KGTS,SKH->TKGH", weights.reshape(scores.shape), v).reshape(t, n, -1)
    if terms.sink_values is None:
        return out
    return out + both[..., t].T[..., None].astype(v.dtype) * terms.sink_values.astype(v.dtype)
