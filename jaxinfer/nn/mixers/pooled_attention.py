"""Grouped-query attention to blocks of tokens that an indexer chooses by the means of their keys.

The parameters are those of ``mixers.attention`` with norms of heads, and of the indexer, which has
J heads of I components:

    index_qk [D, (J + 1) * I]: its queries, then its key   index_norms [2, I]: of queries, of keys

In a step decode rows and prompts differ only in the blocks whose means they complete
(``nn.mixers.windows``, with equal weights).
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Angles, PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers import heads as on_heads
from jaxinfer.nn.mixers.attention import QKNorm, append, attend, output, pages_of
from jaxinfer.nn.mixers.compressed_spec import OPEN_KEY
from jaxinfer.nn.mixers.indexed_latent_spec import KEY
from jaxinfer.nn.mixers.pooled_attention_spec import PooledAttentionConfig
from jaxinfer.nn.mixers.windows import compressed, windows_of, with_windows
from jaxinfer.nn.rope import rope_tables
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.index_topk.api import IndexTopkArgs, index_topk
from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.sparse_attention.api import SparseAttentionArgs, sparse_attention


class PooledAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: PooledAttentionConfig

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
        bias = param(self, "qkv_bias") if c.qkv_bias else None
        w = weight(self, "qkv")
        qkv, stream, h = linear(stream, w, ctx, norm=norm, bias=bias, keep=True)
        gates = None
        if c.gate:
            gates, qkv = jnp.split(qkv, (c.num_heads * c.head_dim,), axis=1)
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        qk_norm = QKNorm(param(self, "qk_norms"), norm.eps)
        selects = len(qkv) > c.indexer.reach if state is None else c.selects
        index = self._index(h, norm.eps, ctx) if selects else None
        if index is not None and state is not None:
            out, state = self._paged(heads, index, qk_norm, state, ctx, only)
        else:
            out, state = attend(
                heads,
                state,
                ctx,
                num_kv_heads=c.num_kv_heads,
                qk_norm=qk_norm,
                scale=c.scale,
                window=None,
                only=only,
                chosen=None if index is None else self._chosen_densely(index, ctx),
            )
        if gates is not None:
            own = gates if only is None else take_rows(gates, only)
            out = on_heads.gated(out, own.reshape(*out.shape[:2], -1), c.gate_act)
        return *output(self, c, stream, out, ctx, only), state

    def _index(self, h: jax.Array, eps: float, ctx: StepContext) -> _Index:  # of [T, D]
        """Queries and keys of the tokens."""
        qk = linear(h, weight(self, "index_qk"), ctx).y
        qk = qk.reshape(len(h), -1, self.config.indexer.head_dim)
        assert self.config.rope is not None
        q = rms_norm(qk[:, :-1], param(self, "index_norms")[0], eps, fixed=ctx.pins.invariant)
        return _Index(on_heads.first_rotated(q, self.config.rope, ctx.angles[0]), qk[:, -1], eps)

    def _keys(
        self,
        means: jax.Array,  # float32[X, I]
        numbers: jax.Array,  # int32[X]
        index: _Index,
        ctx: StepContext,
    ) -> jax.Array:  # [X, I]
        """The keys of blocks with these numbers in their sequences."""
        c, weights = self.config, param(self, "index_norms")[1]
        assert c.rope is not None
        means = means.astype(index.keys.dtype)
        means = rms_norm(means, weights, index.eps, fixed=ctx.pins.invariant)
        angles = Angles(*rope_tables(c.rope, numbers * c.indexer.block))
        return on_heads.first_rotated(means[:, None], c.rope, angles)[:, 0]

    def _paged(
        self,
        heads: jax.Array,  # [T, N + 2K, H]
        index: _Index,
        qk_norm: QKNorm,
        state: LayerArrays,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[jax.Array, LayerArrays]:  # [T, N, H], or with only [B, N, H]
        """Append this step's keys and values to the pages, choose blocks, and attend there."""
        c, rows, tokens = self.config, ctx.rows, slice(None) if only is None else only
        assert rows is not None
        of_heads, of_blocks = ctx.pages
        q, own = append(heads, state, of_heads.slot_mapping, ctx, ctx.angles[0], qk_norm)
        own |= self._pooled(index, state, ctx)
        of_rows = rows.of_token[tokens]
        lens = jnp.where(rows.is_token, ctx.positions + 1, 0)[tokens]
        whole = lens // c.indexer.block
        queries = index.q[tokens]
        among = IndexTopkArgs(
            q=queries,
            weights=jnp.full(queries.shape[:2], c.indexer.head_dim**-0.5, jnp.float32),
            pages=own[KEY],
            page_table=of_blocks.page_table,
            rows=of_rows,
            lens=whole,
            top_k=c.indexer.top_k,
        )
        best = index_topk(among, ctx.pinned("index_topk"))
        blocks = jnp.concatenate((best, whole[:, None]), axis=1)  # and the tokens behind them
        args = SparseAttentionArgs(
            q=q[tokens],
            **pages_of(own),
            page_table=of_heads.page_table,
            rows=of_rows,
            lens=lens,
            blocks=jnp.repeat(blocks[:, None], own["k"].shape[2], axis=1),
            block=c.indexer.block,
            scale=c.scale,
        )
        return sparse_attention(args, ctx.pinned("sparse_attention")), own

    def _pooled(self, index: _Index, state: LayerArrays, ctx: StepContext) -> LayerArrays:
        """The pages with the keys of the blocks that the step completes, and the means of
        unfinished blocks.
        """
        assert (rows := ctx.rows) is not None
        keys, size = index.keys, self.config.indexer.block
        windows = windows_of(rows, ctx.positions, ctx.num_decodes, size)
        equal = jnp.zeros_like(keys), jnp.zeros((size, keys.shape[1]), jnp.float32)
        means, unfinished = compressed(keys, *equal, state[OPEN_KEY], windows, rows, ctx.positions)
        made = self._keys(means, windows.number, index, ctx)
        table = ctx.pages[1].page_table
        return {
            OPEN_KEY: unfinished,
            KEY: with_windows(state[KEY], made, windows, table, len(keys)),
        }

    def _chosen_densely(self, index: _Index, ctx: StepContext) -> jax.Array:  # bool[1, T, T]
        """The keys that each query of one whole sequence attends to."""
        c, count = self.config.indexer, len(index.keys)
        own, number = jnp.arange(count), jnp.arange(count // c.block)
        blocks = index.keys[: len(number) * c.block].reshape(len(number), c.block, -1)
        keys = self._keys(jnp.mean(blocks.astype(jnp.float32), axis=1), number, index, ctx)
        scores = jnp.einsum("TJI,SI->TJS", index.q, keys, preferred_element_type=jnp.float32)
        scores = jnp.sum(jax.nn.relu(jax.lax.stop_gradient(scores)), axis=1)
        is_whole = number < (own[:, None] + 1) // c.block  # [T, blocks]
        _, best = jax.lax.top_k(jnp.where(is_whole, scores, -jnp.inf), min(c.top_k, len(number)))
        chosen = jnp.any(best[..., None] == number, axis=1) & is_whole
        chosen = jnp.repeat(chosen, c.block, axis=1)
        chosen = jnp.pad(chosen, ((0, 0), (0, count - chosen.shape[1])))
        behind = own >= (own[:, None] + 1) // c.block * c.block
        return (chosen | behind)[None]


class _Index(NamedTuple):
    """The queries and keys of tokens that an indexer compares."""

    q: jax.Array  # [T, J, I]: rotated
    keys: jax.Array  # [T, I]: without a norm
    eps: float  # of norms
