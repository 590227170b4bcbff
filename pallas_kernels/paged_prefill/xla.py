"""paged_prefill in plain XLA: tiles of one row's queries over blocks of keys, on every platform.

The numbers of tiles and of blocks are data, not shapes: the work follows the actual queries and
contexts, not the size of the bucket. Blocks are those of ``append_decode.attend_xla``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib import softmax
from pallas_kernels.lib.page_scales import pools_of
from pallas_kernels.lib.softmax import SoftmaxState
from pallas_kernels.paged_prefill.ref import PrefillArgs

QUERIES_PER_TILE = 64


class _Tile(NamedTuple):
    """Consecutive queries of one row; int32 scalars."""

    row: jax.Array
    start: jax.Array  # index of the first query in q
    count: jax.Array  # queries of the row; the rest of the tile is past its end
    position: jax.Array  # of the first query in its context


@jax.jit  # one trace serves every layer
def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    t, n, h = args.q.shape
    num_kv_heads = args.k_pages.shape[2]
    width = min(QUERIES_PER_TILE, t)
    block_pages = softmax.pages_per_block(args.k_pages.shape[1])
    table = jnp.pad(args.page_table, ((0, 0), (0, -args.page_table.shape[1] % block_pages)))
    padded = jnp.pad(args.q, ((0, width), (0, 0), (0, 0)))  # the last tile may extend past the end
    query_lens = jnp.diff(args.query_start_loc)
    row_tiles = jax.lax.div(query_lens + (width - 1), width)
    tile_ends = jnp.cumsum(row_tiles)

    def tile_body(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tile_ends <= i)
        offset = (i - (tile_ends[row] - row_tiles[row])) * width
        tile = _Tile(
            row=row,
            start=args.query_start_loc[row] + offset,
            count=jnp.minimum(width, query_lens[row] - offset),
            position=args.seq_lens[row] - query_lens[row] + offset,
        )
        queries = jax.lax.dynamic_slice_in_dim(padded, tile.start, width).astype(jnp.float32)
        grouped = (queries * args.scale).reshape(width, num_kv_heads, n // num_kv_heads, h)
        grouped = grouped.transpose(1, 2, 0, 3)  # [K, G, width, H]
        result = _attend_tile(grouped, args, table[row], tile)
        result = result.transpose(2, 0, 1, 3).reshape(width, n, h).astype(args.q.dtype)
        # Queries past the row's end are zeros: the next row overwrites them, or they are padding.
        return jax.lax.dynamic_update_slice_in_dim(out, result, tile.start, axis=0)

    return jax.lax.fori_loop(0, tile_ends[-1], tile_body, jnp.zeros_like(padded))[:t]


def _attend_tile(
    queries: jax.Array,  # float32[K, G, width, H], scaled
    args: PrefillArgs,
    page_ids: jax.Array,  # int32[M], a whole number of blocks
    tile: _Tile,
) -> jax.Array:  # float32[K, G, width, H]
    """Attention of one tile over the blocks that its queries see."""
    width, window, pools = queries.shape[2], args.window, pools_of(args)
    page_size, scales = pools[0].shape[1], pools[2:] or (None, None)
    by_head = None if args.slopes is None else args.slopes.reshape(*queries.shape[:2], 1, 1)
    block_pages = softmax.pages_per_block(page_size)
    block = block_pages * page_size
    index = jnp.arange(width)
    last_key = tile.position + index  # [width]: the last visible key of each query
    end = tile.position + tile.count  # keys from here on are not visible and may be unwritten
    in_row = index < tile.count
    oldest = jnp.int32(0) if window is None else jnp.maximum(tile.position - window + 1, 0)

    def block_body(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        ids = jax.lax.dynamic_slice_in_dim(page_ids, i * block_pages, block_pages)
        position = i * block + jnp.arange(block)
        visible = (position <= last_key[:, None]) & in_row[:, None]  # [width, block]
        if window is not None:
            visible &= position > last_key[:, None] - window
        k = softmax.read_block(pools[0], ids, scales[0])
        scores = jnp.einsum("KGTH,SKH->KGTS", queries, k, precision="highest")
        distance = last_key[:, None] - position
        scores = softmax.capped(scores, args.cap)
        scores = softmax.biased(scores, by_head, distance, root=args.root)
        scores = jnp.where(visible, scores, -jnp.inf)
        m_ij, alpha, p = softmax.block_weights(state, scores, -1)
        # 0 * NaN is NaN, and unwritten slots may hold NaN, so masked values become 0.
        v = softmax.read_block(pools[1], ids, scales[1])
        v = jnp.where((position < end)[:, None, None], v, 0.0)
        pv = jnp.einsum("KGTS,SKH->KGTH", p, v, precision="highest")
        l_i = state.l_i * alpha + jnp.sum(p, axis=-1)
        return SoftmaxState(m_ij, l_i, state.acc * alpha[..., None] + pv)

    blocks = (jax.lax.div(oldest, block), jax.lax.div(end + (block - 1), block))
    initial = softmax.init_state(queries.shape[:3], queries.shape[3], *_sinks(queries, args, tile))
    out = softmax.attention_output(jax.lax.fori_loop(*blocks, block_body, initial))
    return jnp.where(in_row[:, None], out, 0.0)


def _sinks(
    queries: jax.Array, args: PrefillArgs, tile: _Tile
) -> tuple[jax.Array | None, jax.Array | None]:  # [K, G, 1] or [K, G, width]; [K, G, width, H]
    """The sinks of a tile's queries [K, G, width, H], and their values if they have some."""
    k, g, width, h = queries.shape
    if args.sinks is None or args.sink_values is None:
        return None if args.sinks is None else args.sinks.reshape(k, g, 1), None
    own = [
        jax.lax.dynamic_slice_in_dim(jnp.pad(one, ((0, width), *rest)), tile.start, width)
        for one, rest in ((args.sinks, [(0, 0)]), (args.sink_values, [(0, 0)] * 2))
    ]
    values = own[1].reshape(width, k, g, h).transpose(1, 2, 0, 3)
    return own[0].reshape(width, k, g).transpose(1, 2, 0), values
