"""Latent attention to pools of tokens that an indexer chooses.

The parameters are those of ``mixers.indexed_latent`` and, in a layer with an indexer of I
components and pools of W tokens:

    index_gate [D, I]   index_bias float32[W, I]: the gates of a pool's mean

The pages of the indexer have an entry for each pool. A pool that is not complete is in the state of
its sequence, a running softmax (``nn.mixers.windows``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import linear
from jaxinfer.nn.mixers.compressed_spec import OPEN_KEY
from jaxinfer.nn.mixers.indexed_latent import IndexedLatentAttention
from jaxinfer.nn.mixers.indexed_latent_spec import KEY
from jaxinfer.nn.mixers.pooled_latent_spec import PooledLatentConfig
from jaxinfer.nn.mixers.windows import compressed, windows_of, with_windows
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.index_topk.ref import NO_POSITION


class PooledLatentAttention(IndexedLatentAttention):
    """The attention block of a layer, with the norm before it."""

    config: PooledLatentConfig

    def keys_densely(
        self,
        keys: jax.Array,  # [T, I]
        h: jax.Array,  # [T, D]
        ctx: StepContext,
    ) -> jax.Array:  # [T // W, I]
        """See ``IndexedLatentAttention``: the keys of complete pools."""
        shape = (len(keys) // self.config.pool, self.config.pool, keys.shape[1])
        whole = shape[0] * shape[1]
        values, gates = (
            x[:whole].astype(jnp.float32).reshape(shape) for x in (keys, self._gates(h, ctx))
        )
        p = jax.nn.softmax(gates + param(self, "index_bias"), axis=1)
        return jnp.sum(p * values, axis=1).astype(keys.dtype)

    def with_keys(
        self,
        keys: jax.Array,  # [T, I]
        h: jax.Array,  # [T, D]
        state: LayerArrays,
        ctx: StepContext,
    ) -> LayerArrays:
        """See ``IndexedLatentAttention``: also the pools that are not complete."""
        assert ctx.rows is not None
        pools = windows_of(ctx.rows, ctx.positions, ctx.num_decodes, self.config.pool)
        bias, gates = param(self, "index_bias"), self._gates(h, ctx)
        found, unfinished = compressed(
            keys, gates, bias, state[OPEN_KEY], pools, ctx.rows, ctx.positions
        )
        table, count = ctx.pages[-1].page_table, len(keys)
        entries = with_windows(state[KEY], found.astype(keys.dtype), pools, table, count)
        return {KEY: entries, OPEN_KEY: unfinished}

    def tokens_of(
        self,
        chosen: jax.Array,  # int32[T, K]: of pools; -1 for none
        lens: jax.Array,  # int32[T]: the tokens that each token sees
    ) -> jax.Array:  # int32[T, K * W + W - 1]
        """See ``IndexedLatentAttention``: those of its pools, and those behind complete pools."""
        size = self.config.pool
        each = jnp.arange(size, dtype=jnp.int32)
        of_pools = jnp.where(chosen[..., None] < 0, NO_POSITION, chosen[..., None] * size + each)
        last = (lens // size * size)[:, None] + each[:-1]
        last = jnp.where(last < lens[:, None], last, NO_POSITION)
        return jnp.concatenate((of_pools.reshape(len(chosen), -1), last), axis=1)

    def _gates(self, h: jax.Array, ctx: StepContext) -> jax.Array:  # [T, I]
        """The gates of the tokens, without the bias of their place in a pool."""
        return linear(h, weight(self, "index_gate"), ctx).y
