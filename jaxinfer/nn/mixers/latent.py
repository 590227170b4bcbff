"""Multi-head latent attention: keys and values of all heads are expanded from one latent a token.

The pages hold a token's *entry*: its normalised latent (C), then the rotated key that all heads
share (R). A decode row multiplies its queries by the weights that would expand latents to keys, and
attends to the latents themselves ("absorbed"); prompts expand keys and values. In shapes: Q width
of the queries' latent, K width of keys without rope (``nope_dim``), V width of values. Parameters:

    q_kv_a  [D, Q + C + R]            q_norm [Q]   q_b [Q, N * (K + R)]
      or    [D, N * (K + R) + C + R]  if queries have no latent
    kv_norm [C]   rope_norm [R] with a norm of rotated keys
                                      kv_b/k [N * K, C]   kv_b/v [N * V, C]
    o       [N * V, D]                o_bias [D]   q_kv_a_bias [Q + C + R], of the last columns
    head_gate [D, N] with gates of the heads' outputs, or [D, N * V] of their components
    q_growth [2, N] with a learned growth                  sinks [N] with sinks
    with output gates q_b is [2 * Q, N * (K + R + V)]: queries and gates of each head
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Angles, PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers import heads as on_heads
from jaxinfer.nn.mixers.latent_spec import POOLS, LatentAttentionConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.kv_append.xla import written
from pallas_kernels.latent_decode.api import LatentDecodeArgs, latent_decode
from pallas_kernels.latent_prefill.api import LatentPrefillArgs, latent_prefill
from pallas_kernels.lib.latent_pages import appended
from pallas_kernels.lib.numerics import rms_norm, rotate
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm


class Tokens(NamedTuple):
    """Queries and entries of some tokens, rotated."""

    q: jax.Array  # [T, N, K + R]
    entries: Any  # [T, C + R]; None in a layer that reads those of another one

    def take(self, tokens: jax.Array | slice) -> Tokens:
        """Those of a subset of the tokens."""
        return Tokens(self.q[tokens], self.entries[tokens])


class Projected(NamedTuple):
    """The results of the projections before attention."""

    stream: Stream  # with its delta added
    tokens: Tokens
    h: Any  # [T, D]: the normalised tokens, if they were to be kept
    q_latent: Any  # [T, Q]: the latent of queries after its norm, if they have one
    gates: Any  # [T, N, V]: of the heads' outputs, if the queries come with them


class Expansion(NamedTuple):
    """The weights that expand latents to keys and values."""

    k: jax.Array  # [N * K, C]
    v: jax.Array  # [N * V, C]


class LatentAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: LatentAttentionConfig

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
        made = projected(self, self.config, stream, norm, ctx)
        kv_b = Expansion(**param(self, "kv_b"))
        out, state = attend(made.tokens, kv_b, state, ctx, self.config, only)
        return *output(self, self.config, made, out, ctx, only), state


def projected(
    module: nn.Module,
    c: LatentAttentionConfig,
    stream: Stream,
    norm: Norm,
    ctx: StepContext,
    *,
    keep: bool = False,
) -> Projected:
    """Queries and entries of the tokens of a stream, with the parameters of a layer; ``keep``
    returns the normalised tokens, too.
    """
    all_heads, latent, gates = c.num_heads * c.head_dim, None, None
    keep |= bool(c.head_gate)
    both, stream, h = linear(stream, weight(module, "q_kv_a"), ctx, norm=norm, keep=keep)
    if c.bias:
        both = both + jnp.pad(param(module, "q_kv_a_bias"), (both.shape[1] - c.bias_dim, 0))
    width = both.shape[1] - (c.entry_dim if c.own_entries else 0)
    q, kv, fixed = both[:, :width], both[:, width:], ctx.pins.invariant
    if c.query_rank is None and ctx.axis is not None:  # the heads of this device
        start = jax.lax.axis_index(ctx.axis) * all_heads
        q = jax.lax.dynamic_slice_in_dim(q, start, all_heads, axis=1)
    if c.query_rank is not None:
        latent = rms_norm(q, param(module, "q_norm"), c.norm_eps, fixed=fixed)
        given = jnp.concatenate((latent, q), axis=1) if c.output_gate else latent
        q = linear(given, weight(module, "q_b"), ctx).y
    q = q.reshape(len(q), c.num_heads, -1)
    if c.output_gate:
        q, gates = jnp.split(q, (c.head_dim,), axis=2)
    if c.growth is not None:
        q = q * on_heads.growth_factors(c.growth, ctx.positions, q.dtype)[:, None, None]
    if c.learned_growth:
        q = q * on_heads.learned_growth(param(module, "q_growth"), ctx.positions, q.dtype)
    if c.rope is not None:
        q_rope = rotated(q[..., c.nope_dim :], ctx.angles[0], interleaved=c.interleaved)
        q = jnp.concatenate((q[..., : c.nope_dim], q_rope), axis=2)
    tokens = Tokens(q, _entries(module, c, kv, ctx) if c.own_entries else None)
    return Projected(stream, tokens, h, latent, gates)


def _entries(
    module: nn.Module,
    c: LatentAttentionConfig,
    kv: jax.Array,  # [T, C + R]
    ctx: StepContext,
) -> jax.Array:  # [T, C + R]
    """The normalised latents of tokens, with their rotated keys."""
    fixed = ctx.pins.invariant
    latents = rms_norm(kv[:, : c.rank], param(module, "kv_norm"), c.norm_eps, fixed=fixed)
    latents = latents if c.latent_scale == 1 else latents * c.latent_scale
    k_rope = kv[:, c.rank :]
    if c.rope_norm:
        k_rope = rms_norm(k_rope, param(module, "rope_norm"), c.norm_eps, fixed=fixed)
    if c.rope is not None:
        angles = ctx.angles[0]
        k_rope = rotated(k_rope[:, None], angles, interleaved=c.interleaved)[:, 0]
    return jnp.concatenate((latents, k_rope), axis=1)


def output(
    module: nn.Module,
    c: LatentAttentionConfig,
    made: Projected,
    out: jax.Array,  # [T, N, V], or with only [B, N, V]
    ctx: StepContext,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, PlainOutput]:
    """The input of a block and its output, of what its heads have attended to."""
    gates = made.gates
    if c.head_gate:
        gates = linear(made.h, weight(module, "head_gate"), ctx).y
        gates = gates.reshape(len(gates), c.num_heads, -1)  # [T, N, 1] or [T, N, V]
    if gates is not None:
        out = on_heads.gated(out, gates if only is None else take_rows(gates, only), "sigmoid")
    out = ctx.at("z", out)
    x = made.stream.x if only is None else made.stream.take(only)
    bias = param(module, "o_bias") if c.bias else None
    out = out.reshape(len(out), -1)
    return x, block_output(out, weight(module, "o"), ctx, bias=bias)


def rotated(
    x: jax.Array,  # [T, heads, R]
    angles: Angles,
    *,
    interleaved: bool,
) -> jax.Array:  # [T, heads, R]
    """Rotate heads by their tokens' angles.

    Interleaved pairs are split into halves first. Scores do not depend on the order of components,
    which is the same in queries and keys.
    """
    if interleaved:
        x = jnp.concatenate((x[..., ::2], x[..., 1::2]), axis=-1)
    return rotate(x, *angles)


def attend(
    tokens: Tokens,
    kv_b: Expansion,
    state: LayerArrays | None,
    ctx: StepContext,
    config: LatentAttentionConfig,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, LayerArrays | None]:  # [T, N, V], or with only [B, N, V]
    """Append this step's entries to the pages and attend over them: see ``attention.attend``.

    Without state, a whole sequence attends to itself.
    """
    if state is None:
        return dense(tokens, kv_b, ctx, config, only), None
    pages, d = ctx.pages[0], ctx.num_decodes
    if len(tokens.q) == d:
        return _decode(tokens, kv_b, state, ctx, config)
    prompts = tokens.take(slice(d, None))
    state = with_entries(state, prompts.entries, pages.slot_mapping[d:])
    if only is not None:  # a decode of all rows, which appends their last tokens again
        return _decode(tokens.take(only), kv_b, state, ctx, config)
    if ctx.pins.invariant:  # every token as a decode row, since expanded keys give other bits
        return _decode(tokens, kv_b, state, ctx.token_rows(), config)
    parts: list[jax.Array] = []
    if d:
        out, state = _decode(tokens.take(slice(d)), kv_b, state, ctx, config)
        parts.append(out)
    assert ctx.rows is not None
    args = LatentPrefillArgs(
        q=prompts.q,
        entries=prompts.entries,
        k_up=kv_b.k,
        v_up=kv_b.v,
        **pools_of(state),
        page_table=pages.page_table[d:],
        seq_lens=pages.seq_lens[d:],
        query_start_loc=ctx.rows.query_start_loc,
        scale=config.scale,
    )
    parts.append(latent_prefill(args, ctx.pinned("latent_prefill")))
    return jnp.concatenate(parts) if d else parts[0], state


def _decode(
    tokens: Tokens,  # one of each of the first rows
    kv_b: Expansion,
    state: LayerArrays,
    ctx: StepContext,
    config: LatentAttentionConfig,
) -> tuple[jax.Array, LayerArrays]:  # [rows, N, V]
    """Append and attend, with queries that have absorbed the expansion to keys."""
    c, pages, rows = config, ctx.pages[0], len(tokens.q)
    k_heads = kv_b.k.reshape(c.num_heads, c.nope_dim, c.rank)
    v_heads = kv_b.v.reshape(c.num_heads, c.value_dim, c.rank)
    q_nope, q_rope = tokens.q[..., : c.nope_dim], tokens.q[..., c.nope_dim :]
    args = LatentDecodeArgs(
        q_latent=_by_heads(q_nope, k_heads, ctx),
        q_rope=q_rope,
        entries=tokens.entries,
        **pools_of(state),
        page_table=pages.page_table[:rows],
        seq_lens=pages.seq_lens[:rows],
        scale=c.scale,
    )
    mixed, *pools = latent_decode(args, ctx.pinned("latent_decode"))
    return _by_heads(mixed, v_heads, ctx, by_output=True), with_pools(pools)


def with_entries(
    state: LayerArrays,
    entries: jax.Array,  # [T, C + R]
    slots: jax.Array,  # int32[T]
) -> LayerArrays:
    """The pools with entries in these slots.

    It comes before pages are read, and has a barrier: else XLA copies the pool.
    """
    pools = tuple(state[name] for name in POOLS if name in state)
    pairs = zip(pools, appended(entries, pools), strict=True)
    made = jax.lax.optimization_barrier(tuple(written(to, x, slots) for to, x in pairs))
    return with_pools(made)


def pools_of(state: LayerArrays) -> dict[str, Any]:
    """The pools of a layer as arguments of ops."""
    return dict(zip(("pages", "scales", "rope_pages"), map(state.get, POOLS), strict=True))


def with_pools(pools: Sequence[jax.Array]) -> LayerArrays:
    """The state of the pools that an op returns."""
    return dict(zip(POOLS, pools, strict=False))


def _by_heads(
    x: jax.Array,  # [B, N, I]
    w: jax.Array,  # [N, I, O], or by output [N, O, I]
    ctx: StepContext,
    *,
    by_output: bool = False,
) -> jax.Array:  # [B, N, O]
    """The matmul of each head."""
    if not ctx.pins.invariant:
        return jnp.einsum("BNI,NOI->BNO" if by_output else "BNI,NIO->BNO", x, w)

    def of_head(both: tuple[jax.Array, jax.Array]) -> jax.Array:  # [B, O]
        args = GemmArgs(x=both[0], w=both[1], by_output=by_output)
        return skinny_gemm(args, ctx.pinned("skinny_gemm"))

    return jax.lax.map(of_head, (jnp.swapaxes(x, 0, 1), w)).swapaxes(0, 1)


def dense(
    tokens: Tokens,
    kv_b: Expansion,
    ctx: StepContext,
    config: LatentAttentionConfig,
    only: jax.Array | None,  # int32[B]
    chosen: jax.Array | None = None,  # bool[T, T]: see ``indexed_latent``
    sinks: jax.Array | None = None,  # [N]
) -> jax.Array:  # [T, N, V], or with only [B, N, V]
    """Causal attention of one whole sequence over itself; supports gradients and vmap."""
    c, t = config, len(tokens.q)
    latents, k_rope = tokens.entries[:, : c.rank], tokens.entries[:, None, c.rank :]
    k_nope = (latents @ kv_b.k.T).reshape(t, c.num_heads, c.nope_dim)
    k_rope = jnp.broadcast_to(k_rope, (t, c.num_heads, c.rope_dim))
    v = (latents @ kv_b.v.T).reshape(t, c.num_heads, c.value_dim)
    q, k = ctx.at("q", tokens.q), ctx.at("k", jnp.concatenate((k_nope, k_rope), axis=2))
    v = ctx.at("v", v)
    scores = jnp.einsum("TNH,SNH->NTS", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((t, t), bool)) if chosen is None else chosen
    scores = ctx.at("scores", jnp.where(visible, scores * c.scale, -jnp.inf))
    if sinks is not None:
        beside = jnp.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (c.num_heads, t, 1))
        scores = jnp.concatenate((scores, beside), axis=-1)
    pattern = ctx.at("pattern", jax.nn.softmax(scores, axis=-1)[..., :t].astype(v.dtype))
    out = jnp.einsum("NTS,SNV->TNV", pattern, v)
    return out if only is None else out[only]
