"""Latent attention in which each token attends to the tokens that an indexer has chosen.

The parameters are those of ``mixers.latent`` and, in a layer with an indexer of J heads of I
components:

    index_q       [Q, J * I]   of the latent of queries
    index_k       [D, I]       index_k_norm [2, I]: a LayerNorm's weight and bias
    index_weights [J, D]       index_q_norm [2, D], index_q_growth [2, J] if the indexer has them
    input_gate_in [D, R], input_gate_out [R, D] with a gate of the norm

The pages of a paged kind of its own hold a token's key, which is normalised and rotated. In a step
decode rows and prompts are the same: each token chooses positions of its row, and its queries,
which absorb the expansion to keys, attend to the latents there. Layers that follow this one get the
positions under the name ``CHOSEN``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, layer_norm, linear
from jaxinfer.nn.mixers import heads as on_heads
from jaxinfer.nn.mixers.indexed_latent_spec import (
    CHOSEN,
    KEY,
    SHARED,
    IndexedLatentConfig,
    IndexerConfig,
)
from jaxinfer.nn.mixers.latent import (
    Expansion,
    Projected,
    attend,
    dense,
    output,
    pools_of,
    projected,
    rotated,
    with_entries,
)
from jaxinfer.nn.norm_gate import gated_norm
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import Matmul, param, weight
from pallas_kernels.index_topk.api import IndexTopkArgs, index_topk
from pallas_kernels.index_topk.ref import NO_POSITION
from pallas_kernels.kv_append.xla import written
from pallas_kernels.sparse_latent.api import SparseLatentArgs, sparse_latent

_TABLE = "page_table"  # of the pools that a layer shares


class IndexedLatentAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: IndexedLatentConfig

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
        given, before = stream, norm
        if c.input_gate is not None:
            stream, h = gated_norm(self, "input_gate", stream, norm, ctx)
            given, before = Stream(h), norm.as_none()
        made = projected(self, c, given, before, ctx, keep=c.indexer is not None)
        if c.input_gate is not None:
            made = made._replace(stream=stream)
        kv_b = Expansion(**param(self, "kv_b"))
        if ctx.rows is None:
            out, state = self._dense(made, kv_b, state, ctx, only)
        elif c.selects:
            out, state = self._paged(made, kv_b, state, ctx, only)
        else:
            out, state = attend(made.tokens, kv_b, state, ctx, c, only)
        return *output(self, c, made, out, ctx, only), state

    def _dense(
        self,
        made: Projected,
        kv_b: Expansion,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[jax.Array, LayerArrays]:  # [T, N, V], or with only [B, N, V]
        """Attention of one whole sequence, and what layers that follow get."""
        c, tokens, passed = self.config, made.tokens, dict[str, jax.Array]()
        if (chosen := self._chosen_densely(made, state, ctx)) is not None:
            passed[CHOSEN] = chosen
        if c.shares:
            passed[SHARED] = tokens.entries
        if not c.own_entries:
            assert state is not None, "an earlier layer has the entries"
            tokens = tokens._replace(entries=state[SHARED])
        visible = None if chosen is None else _mask(chosen)
        return dense(tokens, kv_b, ctx, c, only, visible, self._sinks()), passed

    def _chosen_densely(
        self, made: Projected, state: LayerArrays | None, ctx: StepContext
    ) -> jax.Array | None:  # int32[T, K]
        """The choices in one whole sequence; None if it has no more tokens than are chosen."""
        c, count = self.config, len(made.tokens.q)
        if count <= c.top_k:
            return None
        if c.indexer is None:
            assert state is not None, "an earlier layer has chosen"
            return state[CHOSEN]
        index, lens = index_of(self, c, c.indexer, made, ctx), jnp.arange(1, count + 1)
        keys, size = self.keys_densely(index.keys, made.h, ctx), c.tokens_per_key

        def with_head(total: jax.Array, head: Any) -> tuple[jax.Array, None]:
            q, weights = head  # [T, I], float32[T]
            found = jnp.matmul(q, keys.T, preferred_element_type=jnp.float32)
            return total + weights[:, None] * jax.nn.relu(found), None

        heads = index.q.swapaxes(0, 1), index.weights.T
        scores, _ = jax.lax.scan(with_head, jnp.zeros((count, len(keys))), heads)
        seen, most = (lens // size)[:, None], c.top_k // size
        is_seen = jnp.arange(len(keys)) < seen
        _, best = jax.lax.top_k(jnp.where(is_seen, jax.lax.stop_gradient(scores), -jnp.inf), most)
        return self.tokens_of(jnp.where(jnp.arange(most) < seen, best, NO_POSITION), lens)

    def _paged(
        self,
        made: Projected,
        kv_b: Expansion,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[jax.Array, LayerArrays]:  # [T, N, V], or with only [B, N, V]
        """Append this step's entries and keys to the pages, choose positions, and attend there."""
        c, rows, tokens = self.config, ctx.rows, slice(None) if only is None else only
        assert rows is not None and state is not None
        own: dict[str, Any] = {}
        latents: Any = state.get(SHARED)  # of an earlier layer
        if c.own_entries:
            own = with_entries(state, made.tokens.entries, ctx.pages[0].slot_mapping)
            latents = {**own, _TABLE: ctx.pages[0].page_table}
        of_rows, lens = rows.of_token[tokens], jnp.where(rows.is_token, ctx.positions + 1, 0)
        if c.indexer is None:
            chosen = state[CHOSEN][tokens]
        else:
            index = index_of(self, c, c.indexer, made, ctx)
            own |= self.with_keys(index.keys, made.h, state, ctx)
            among = IndexTopkArgs(
                q=index.q[tokens],
                weights=index.weights[tokens],
                pages=own[KEY],
                page_table=ctx.pages[-1].page_table,
                rows=of_rows,
                lens=lens[tokens] // c.tokens_per_key,
                top_k=c.top_k // c.tokens_per_key,
            )
            found = index_topk(among, ctx.pinned("index_topk"))
            chosen = own[CHOSEN] = self.tokens_of(found, lens[tokens])
        args = SparseLatentArgs(
            q=made.tokens.q[tokens],
            k_up=kv_b.k,
            v_up=kv_b.v,
            **pools_of(latents),
            page_table=latents[_TABLE],
            rows=of_rows,
            positions=chosen,
            sinks=self._sinks(),
            scale=c.scale,
        )
        own |= {SHARED: latents} if c.shares else {}
        return sparse_latent(args, ctx.pinned("sparse_latent")), own

    def keys_densely(
        self,
        keys: jax.Array,  # [T, I]
        h: jax.Array,  # [T, D]
        ctx: StepContext,
    ) -> jax.Array:  # [T // tokens_per_key, I]
        """The keys of one whole sequence that an indexer compares."""
        del h, ctx
        return keys

    def with_keys(
        self,
        keys: jax.Array,  # [T, I]
        h: jax.Array,  # [T, D]
        state: LayerArrays,
        ctx: StepContext,
    ) -> LayerArrays:
        """The arrays of the layer that have keys, with those of the step's tokens."""
        del h
        slots = ctx.pages[-1].slot_mapping
        return {KEY: jax.lax.optimization_barrier(written(state[KEY], keys, slots))}

    def tokens_of(
        self,
        chosen: jax.Array,  # int32[T, K]: of keys; -1 for none
        lens: jax.Array,  # int32[T]: the tokens that each token sees
    ) -> jax.Array:  # int32[T, K]
        """The positions of the tokens to which each token attends, of the keys that it chooses."""
        del lens
        return chosen

    def _sinks(self) -> jax.Array | None:  # [N]
        return param(self, "sinks") if self.config.sinks else None


class Index(NamedTuple):
    """The queries, their weights and the keys that an indexer compares."""

    q: jax.Array  # [T, J, I]
    weights: jax.Array  # float32[T, J]
    keys: jax.Array  # [T, I]


def index_of(
    module: nn.Module,
    config: IndexedLatentConfig,
    indexer: IndexerConfig,
    made: Projected,
    ctx: StepContext,
) -> Index:
    """Queries, weights of their heads and keys of the tokens; every device has all of them."""
    c, rope = indexer, config.rope_dim

    def normed(x: jax.Array, name: str) -> jax.Array:  # [T, ...]
        norm = param(module, name)
        return layer_norm(x, norm[0], norm[1], c.norm_eps, fixed=ctx.pins.invariant)

    given = normed(made.h, "index_q_norm") if c.of_tokens else made.q_latent
    q = linear(given, weight(module, "index_q"), ctx).y.reshape(-1, c.num_heads, c.head_dim)
    if c.learned_growth:
        q = q * on_heads.learned_growth(param(module, "index_q_growth"), ctx.positions, q.dtype)
    keys = normed(linear(made.h, weight(module, "index_k"), ctx).y, "index_k_norm")
    how = Matmul(ctx.pins, wide=True)
    weights = weight(module, "index_weights", by_output=True).matmul(made.h, how)

    def turned(x: jax.Array) -> jax.Array:  # [T, heads, I]
        if config.rope is None:
            return x
        first = c.head_dim - rope if c.rotates_last else 0
        before, own, after = jnp.split(x, (first, first + rope), axis=-1)
        own = rotated(own, ctx.angles[0], interleaved=c.interleaved)
        return jnp.concatenate((before, own, after), axis=-1)

    scale = (c.num_heads * c.head_dim) ** -0.5
    return Index(turned(q), weights * scale, turned(keys[:, None])[:, 0])


def _mask(chosen: jax.Array) -> jax.Array:  # int32[T, K] -> bool[T, T]
    """True where a token attends; -1 stands for a column behind the last."""
    count = len(chosen)
    mask = jnp.zeros((count, count + 1), bool).at[jnp.arange(count)[:, None], chosen].set(True)
    return mask[:, :count]
