"""index_topk in plain XLA: the scores of some tokens for their whole contexts, then ``top_k``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.index_topk.ref import NO_POSITION, IndexTopkArgs
from pallas_kernels.lib.token_tiles import MOST_TOKENS, by_tiles, wide_einsum

KEYS_PER_BLOCK = 512
# Bytes of one tile's scores, of which sorting needs a few times as many.
TILE_BYTES = 16 << 20


@partial(jax.jit, static_argnames="fixed")  # one trace serves every layer
def index_topk(args: IndexTopkArgs, *, fixed: bool = False) -> jax.Array:  # int32[T, K]
    """See ``index_topk.api``; ``fixed`` takes tokens one at a time: the same bits in any step."""
    block_pages = _block_pages(args)
    rest = -args.page_table.shape[1] % block_pages
    table = jnp.pad(args.page_table, ((0, 0), (0, rest)))
    block, length = block_pages * args.pages.shape[1], table.shape[1] * args.pages.shape[1]

    def of_tile(
        q: jax.Array,  # [W, H, D]
        weights: jax.Array,  # float32[W, H]
        rows: jax.Array,  # int32[W]
        lens: jax.Array,  # int32[W]
    ) -> jax.Array:  # int32[W, K]
        ids = jnp.take(table, rows, axis=0, mode="clip")

        def block_body(i: jax.Array, scores: jax.Array) -> jax.Array:  # float32[W, length]
            own = jax.lax.dynamic_slice_in_dim(ids, i * block_pages, block_pages, axis=1)
            keys = args.pages.at[own].get(mode="clip").reshape(len(q), block, -1)
            found = _scores(q, weights, keys)
            seen = i * block + jnp.arange(block) < lens[:, None]
            found = jnp.where(seen, found, -jnp.inf)  # unwritten slots may hold NaN
            return jax.lax.dynamic_update_slice_in_dim(scores, found, i * block, axis=1)

        scores = jnp.full((len(q), length), -jnp.inf)
        blocks = jax.lax.div(jnp.max(lens) + (block - 1), block)
        scores = jax.lax.fori_loop(0, blocks, block_body, scores)
        _, best = jax.lax.top_k(scores, args.width)
        return jnp.where(jnp.arange(args.width) < lens[:, None], best, NO_POSITION)

    given = (args.q, args.weights, args.rows, args.lens)
    return by_tiles(of_tile, given, 1 if fixed else TILE_BYTES // (4 * length))


def workspace(args: IndexTopkArgs) -> int:
    """The scores of a tile, the order that sorts them and a copy of both, and one block's keys and
    scores of heads.
    """
    (_, heads, width), block = args.q.shape, _block_pages(args) * args.pages.shape[1]
    tile = MOST_TOKENS * block * (heads * 4 + width * args.pages.dtype.itemsize)
    return 4 * TILE_BYTES + tile


def _block_pages(args: IndexTopkArgs) -> int:
    return max(1, KEYS_PER_BLOCK // args.pages.shape[1])


def _scores(
    q: jax.Array,  # [W, H, D]
    weights: jax.Array,  # float32[W, H]
    keys: jax.Array,  # [W, L, D]
) -> jax.Array:  # float32[W, L]
    by_head = jax.nn.relu(wide_einsum("WHD,WLD->WHL", q, keys.astype(q.dtype)))
    return wide_einsum("WH,WHL->WL", weights, by_head)
