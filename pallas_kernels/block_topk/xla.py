"""block_topk in plain XLA: the largest score of each block of a token's context, then ``top_k``."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.block_topk.ref import NO_BLOCK, BlockTopkArgs
from pallas_kernels.lib.context_scores import block_pages, context_scores, padded_table
from pallas_kernels.lib.token_tiles import MOST_TOKENS, by_tiles, wide_einsum

# Bytes of the scores of one tile's blocks, of which sorting needs a few times as many.
TILE_BYTES = 16 << 20


@partial(jax.jit, static_argnames="fixed")  # one trace serves every layer
def block_topk(args: BlockTopkArgs, *, fixed: bool = False) -> jax.Array:  # int32[T, H, K]
    """See ``block_topk.api``; ``fixed`` takes tokens one at a time: the same bits in any step."""
    pages = _read_pages(args)
    table = padded_table(args.page_table, pages)
    blocks = table.shape[1] * args.pages.shape[1] // args.block

    def of_tile(
        q: jax.Array,  # [W, H, D]
        rows: jax.Array,  # int32[W]
        lens: jax.Array,  # int32[W]
    ) -> jax.Array:  # int32[W, H, K]
        def score(keys: jax.Array) -> jax.Array:  # [W, L, D] -> float32[W, H, L]
            return wide_einsum("WHD,WLD->WHL", q, keys.astype(q.dtype))

        ids = jnp.take(table, rows, axis=0, mode="clip")
        scores = context_scores(args.pages, ids, lens, score, block=pages, merged=args.block)
        seen = jax.lax.div(lens + (args.block - 1), jnp.int32(args.block))[:, None, None]
        own = jnp.arange(blocks)
        scores = jnp.where((own >= seen - args.local) & (own < seen), jnp.inf, scores)
        _, best = jax.lax.top_k(scores, args.width)
        return jnp.where(jnp.arange(args.width) < seen, best, NO_BLOCK)

    most = 1 if fixed else TILE_BYTES // (4 * args.q.shape[1] * blocks)
    return by_tiles(of_tile, (args.q, args.rows, args.lens), most)


def workspace(args: BlockTopkArgs) -> int:
    """The scores of a tile's blocks, the order that sorts them and a copy of both, and the keys
    that are read at a time with their scores.
    """
    (_, heads, width), keys = args.q.shape, _read_pages(args) * args.pages.shape[1]
    tile = MOST_TOKENS * keys * (heads * 4 + width * args.pages.dtype.itemsize)
    return 4 * TILE_BYTES + tile


def _read_pages(args: BlockTopkArgs) -> int:
    """The pages that are read at a time, which are whole blocks."""
    size = args.pages.shape[1]
    return block_pages(size, math.lcm(size, args.block) // size)
