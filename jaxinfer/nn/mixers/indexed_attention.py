"""Grouped-query attention in which each token attends to blocks that an indexer has chosen.

The parameters are those of ``mixers.attention`` with norms of heads, and of the indexer, which has
J heads of I components, one for each KV head:

    index_q [D, J * I]   index_k [D, I]   index_norms [2, I]: of queries, of keys

The pages of a paged kind of its own hold a token's key, which is normalised and rotated. In a step
decode rows and prompts are the same: the heads of each token choose blocks of its row, and its
queries attend to the keys there.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, append, attend, output, pages_of
from jaxinfer.nn.mixers.heads import first_rotated
from jaxinfer.nn.mixers.indexed_attention_spec import BlockIndexerConfig, IndexedAttentionConfig
from jaxinfer.nn.mixers.indexed_latent_spec import KEY
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.block_topk.api import BlockTopkArgs, block_topk
from pallas_kernels.kv_append.xla import written
from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.sparse_attention.api import SparseAttentionArgs, sparse_attention


class IndexedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: IndexedAttentionConfig

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
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        qk_norm = QKNorm(param(self, "qk_norms"), norm.eps)
        selects = len(qkv) > c.indexer.reach if state is None else c.selects
        index = _index(self, c, h, norm.eps, ctx) if selects else None
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
                chosen=None if index is None else _chosen_densely(index, c.indexer),
            )
        return *output(self, c, stream, out, ctx, only), state

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
        of_heads, of_index = ctx.pages
        q, own = append(heads, state, of_heads.slot_mapping, ctx, ctx.angles[0], qk_norm)
        own[KEY] = jax.lax.optimization_barrier(
            written(state[KEY], index.keys, of_index.slot_mapping)
        )
        of_rows, lens = rows.of_token[tokens], jnp.where(rows.is_token, ctx.positions + 1, 0)
        among = BlockTopkArgs(
            q=index.q[tokens],
            pages=own[KEY],
            page_table=of_index.page_table,
            rows=of_rows,
            lens=lens[tokens],
            block=c.indexer.block,
            top_k=c.indexer.top_k,
            local=c.indexer.local,
        )
        args = SparseAttentionArgs(
            q=q[tokens],
            **pages_of(own),
            page_table=of_heads.page_table,
            rows=of_rows,
            lens=lens[tokens],
            blocks=block_topk(among, ctx.pinned("block_topk")),
            block=c.indexer.block,
            scale=c.scale,
        )
        return sparse_attention(args, ctx.pinned("sparse_attention")), own


class _Index(NamedTuple):
    """The queries and keys that an indexer compares."""

    q: jax.Array  # [T, J, I]
    keys: jax.Array  # [T, I]


def _index(
    module: nn.Module,
    config: IndexedAttentionConfig,
    h: jax.Array,  # [T, D]
    eps: float,
    ctx: StepContext,
) -> _Index:
    """Queries and keys of the tokens; every device has all keys and its heads' queries."""
    rope, (of_q, of_keys) = config.rope, param(module, "index_norms")
    assert rope is not None

    def made(name: str, by: jax.Array) -> jax.Array:  # [T, heads, I]
        x = linear(h, weight(module, name), ctx).y.reshape(len(h), -1, config.indexer.head_dim)
        x = rms_norm(x, by, eps, fixed=ctx.pins.invariant)
        return first_rotated(x, rope, ctx.angles[0])

    return _Index(made("index_q", of_q), made("index_k", of_keys)[:, 0])


def _chosen_densely(index: _Index, c: BlockIndexerConfig) -> jax.Array:  # bool[J, T, T]
    """The keys of the blocks that each query of one whole sequence has chosen."""
    own = jnp.arange(len(index.keys))
    scores = jnp.einsum("TJI,SI->JTS", *index, preferred_element_type=jnp.float32)
    scores = jnp.where(own <= own[:, None], jax.lax.stop_gradient(scores), -jnp.inf)
    rest = ((0, 0), (0, 0), (0, -len(own) % c.block))
    scores = jnp.pad(scores, rest, constant_values=-jnp.inf)
    scores = scores.reshape(*scores.shape[:2], -1, c.block).max(axis=-1)  # [J, T, blocks]
    behind = own[:, None] // c.block - jnp.arange(scores.shape[-1])
    scores = jnp.where((behind >= 0) & (behind < c.local), jnp.inf, scores)
    _, best = jax.lax.top_k(scores, c.top_k)
    chosen = jnp.any(best[..., None] == jnp.arange(scores.shape[-1]), axis=2)
    return jnp.repeat(chosen, c.block, axis=-1)[..., : len(own)]
