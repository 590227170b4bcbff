"""index_topk in plain XLA: the scores of some tokens for their whole contexts, then ``top_k``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.index_topk.ref import NO_POSITION, IndexTopkArgs
from pallas_kernels.lib.context_scores import block_pages, context_scores, padded_table
from pallas_kernels.lib.token_tiles import MOST_TOKENS, by_tiles, wide_einsum

# Bytes of one tile's scores, of which sorting needs a few times as many.
TILE_BYTES = 16 << 20


@partial(jax.jit, static_argnames="fixed")  # one trace serves every layer
def index_topk(args: IndexTopkArgs, *, fixed: bool = False) -> jax.Array:  # int32[T, K]
    """See ``index_topk.api``; ``fixed`` takes tokens one at a time: the same bits in any step."""
    block = block_pages(args.pages.shape[1])
    table = padded_table(args.page_table, block)
    length = table.shape[1] * args.pages.shape[1]

    def of_tile(
        q: jax.Array,  # [W, H, D]
        weights: jax.Array,  # float32[W, H]
        rows: jax.Array,  # int32[W]
        lens: jax.Array,  # int32[W]
    ) -> jax.Array:  # int32[W, K]
        ids = jnp.take(table, rows, axis=0, mode="clip")
        score = partial(_scores, q, weights)
        scores = context_scores(args.pages, ids, lens, score, block=block)
        _, best = jax.lax.top_k(scores, args.width)
        return jnp.where(jnp.arange(args.width) < lens[:, None], best, NO_POSITION)

    given = (args.q, args.weights, args.rows, args.lens)
    return by_tiles(of_tile, given, 1 if fixed else TILE_BYTES // (4 * length))


def workspace(args: IndexTopkArgs) -> int:
    """The scores of a tile, the order that sorts them and a copy of both, and one block's keys and
    scores of heads.
    """
    (_, heads, width), size = args.q.shape, args.pages.shape[1]
    block = block_pages(size) * size
    tile = MOST_TOKENS * block * (heads * 4 + width * args.pages.dtype.itemsize)
    return 4 * TILE_BYTES + tile


def _scores(
    q: jax.Array,  # [W, H, D]
    weights: jax.Array,  # float32[W, H]
    keys: jax.Array,  # [W, L, D]
) -> jax.Array:  # float32[W, L]
    by_head = jax.nn.relu(wide_einsum("WHD,WLD->WHL", q, keys.astype(q.dtype)))
    return wide_einsum("WH,WHL->WL", weights, by_head)
