"""Multi-head latent attention: keys and values of all heads are expanded from one latent a token.

The pages hold a token's *entry*: its normalised latent (C), then the rotated key that all heads
share (R). A decode row multiplies its queries by the weights that would expand latents to keys, and
attends to the latents themselves ("absorbed"); prompts expand keys and values. In shapes: Q width
of the queries' latent, K width of keys without rope (``nope_dim``), V width of values. Parameters:

    q_kv_a  [D, Q + C + R]            q_norm [Q]   q_b [Q, N * (K + R)]
      or    [D, N * (K + R) + C + R]  if queries have no latent
    kv_norm [C]                       kv_b/k [N * K, C]   kv_b/v [N * V, C]
    o       [N * V, D]                o_bias [D]   q_kv_a_bias [Q + C + R], of the last columns
    head_gate [D, N] with gates of the heads' outputs
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


class _Tokens(NamedTuple):
    """Queries and entries of some tokens, rotated."""

    q: jax.Array  # [T, N, K + R]
    entries: jax.Array  # [T, C + R]

    def take(self, tokens: jax.Array | slice) -> _Tokens:
        return _Tokens(self.q[tokens], self.entries[tokens])


class _Expansion(NamedTuple):
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
        c = self.config
        stream, tokens, gates = self._projected(stream, norm, ctx)
        kv_b = _Expansion(**param(self, "kv_b"))
        out, state = _attend(tokens, kv_b, state, ctx, c, only)
        if gates is not None:
            own = gates if only is None else take_rows(gates, only)
            out = on_heads.gated(out, own[..., None], "sigmoid")
        out = ctx.at("z", out)
        x = stream.x if only is None else stream.take(only)
        bias = param(self, "o_bias") if c.bias else None
        out = out.reshape(len(out), -1)
        return x, block_output(out, weight(self, "o"), ctx, bias=bias), state

    def _projected(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[Stream, _Tokens, jax.Array | None]:  # the gates [T, N]
        """The stream with its delta added, queries and entries of its tokens, gates of heads."""
        c, all_heads = self.config, self.config.num_heads * self.config.head_dim
        w = weight(self, "q_kv_a")
        both, stream, h = linear(stream, w, ctx, norm=norm, keep=c.head_gate)
        gates = linear(h, weight(self, "head_gate"), ctx).y if c.head_gate else None
        if c.bias:
            both = both + jnp.pad(param(self, "q_kv_a_bias"), (both.shape[1] - c.bias_dim, 0))
        width = both.shape[1] - c.entry_dim
        q, kv, fixed = both[:, :width], both[:, width:], ctx.pins.invariant
        if c.query_rank is None and ctx.axis is not None:  # the heads of this device
            start = jax.lax.axis_index(ctx.axis) * all_heads
            q = jax.lax.dynamic_slice_in_dim(q, start, all_heads, axis=1)
        if c.query_rank is not None:
            q = rms_norm(q, param(self, "q_norm"), c.norm_eps, fixed=fixed)
            q = linear(q, weight(self, "q_b"), ctx).y
        latents = rms_norm(kv[:, : c.rank], param(self, "kv_norm"), c.norm_eps, fixed=fixed)
        latents = latents if c.latent_scale == 1 else latents * c.latent_scale
        q = q.reshape(len(q), c.num_heads, c.head_dim)
        if c.growth is not None:
            q = q * on_heads.growth_factors(c.growth, ctx.positions, q.dtype)[:, None, None]
        if c.rope is None:
            return stream, _Tokens(q, jnp.concatenate((latents, kv[:, c.rank :]), axis=1)), gates
        angles = ctx.angles[0]
        k_rope = _rotated(kv[:, None, c.rank :], angles, interleaved=c.interleaved)[:, 0]
        q_rope = _rotated(q[..., c.nope_dim :], angles, interleaved=c.interleaved)
        q = jnp.concatenate((q[..., : c.nope_dim], q_rope), axis=2)
        return stream, _Tokens(q, jnp.concatenate((latents, k_rope), axis=1)), gates


def _rotated(
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


def _attend(
    tokens: _Tokens,
    kv_b: _Expansion,
    state: LayerArrays | None,
    ctx: StepContext,
    config: LatentAttentionConfig,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, LayerArrays | None]:  # [T, N, V], or with only [B, N, V]
    """Append this step's entries to the pages and attend over them: see ``attention.attend``.

    Without state, a whole sequence attends to itself.
    """
    if state is None:
        return _dense(tokens, kv_b, ctx, config, only), None
    pages, d = ctx.pages[0], ctx.num_decodes
    if len(tokens.q) == d:
        return _decode(tokens, kv_b, state, ctx, config)
    # before pages are read, and with a barrier: else XLA copies the pool
    prompts = tokens.take(slice(d, None))
    pools, slots = tuple(state[name] for name in POOLS if name in state), pages.slot_mapping[d:]
    pairs = zip(pools, appended(prompts.entries, pools), strict=True)
    made = jax.lax.optimization_barrier(tuple(written(to, x, slots) for to, x in pairs))
    state = _with_pools(made)
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
        **_pools(state),
        page_table=pages.page_table[d:],
        seq_lens=pages.seq_lens[d:],
        query_start_loc=ctx.rows.query_start_loc,
        scale=config.scale,
    )
    parts.append(latent_prefill(args, ctx.pinned("latent_prefill")))
    return jnp.concatenate(parts) if d else parts[0], state


def _decode(
    tokens: _Tokens,  # one of each of the first rows
    kv_b: _Expansion,
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
        **_pools(state),
        page_table=pages.page_table[:rows],
        seq_lens=pages.seq_lens[:rows],
        scale=c.scale,
    )
    mixed, *pools = latent_decode(args, ctx.pinned("latent_decode"))
    return _by_heads(mixed, v_heads, ctx, by_output=True), _with_pools(pools)


def _pools(state: LayerArrays) -> dict[str, Any]:
    """The pools of a layer as arguments of ops."""
    return dict(zip(("pages", "scales", "rope_pages"), map(state.get, POOLS), strict=True))


def _with_pools(pools: Sequence[jax.Array]) -> LayerArrays:
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


def _dense(
    tokens: _Tokens,
    kv_b: _Expansion,
    ctx: StepContext,
    config: LatentAttentionConfig,
    only: jax.Array | None,  # int32[B]
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
    visible = jnp.tril(jnp.ones((t, t), bool))
    scores = ctx.at("scores", jnp.where(visible, scores * c.scale, -jnp.inf))
    pattern = ctx.at("pattern", jax.nn.softmax(scores, axis=-1).astype(v.dtype))
    out = jnp.einsum("NTS,SNV->TNV", pattern, v)
    return out if only is None else out[only]
