"""paged_prefill in plain XLA: tiles of one row's queries over blocks of keys, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_decode.xla import KEYS_PER_BLOCK

QUERIES_PER_TILE = 64


def paged_prefill(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    t, n, h = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    tile = min(QUERIES_PER_TILE, t)
    block_pages = max(1, KEYS_PER_BLOCK // page_size)
    block = block_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    # A row's last tile reaches past the row: give the last row room, too.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    query_lens = jnp.diff(query_start_loc)
    row_tiles = -(-query_lens // tile)
    tile_ends = jnp.cumsum(row_tiles)

    def tile_body(i, out):
        row = jnp.searchsorted(tile_ends, i, side="right")
        offset = (i - (tile_ends[row] - row_tiles[row])) * tile  # within the row's queries
        start = query_start_loc[row] + offset
        queries = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        queries = queries.astype(jnp.float32) * scale
        grouped = queries.reshape(tile, num_kv_heads, -1, h).transpose(1, 2, 0, 3)  # [K, G, t, H]
        first_position = seq_lens[row] - query_lens[row] + offset
        count = jnp.minimum(tile, query_lens[row] - offset)
        query_position = first_position + jnp.arange(tile)
        in_row = jnp.arange(tile) < count
        last = -(-(first_position + count) // block)
        first = 0 if window is None else jnp.maximum(first_position - window + 1, 0) // block

        def block_body(j, carry):
            top, total, acc = carry
            pages = jax.lax.dynamic_slice(table, (row, j * block_pages), (1, block_pages))[0]
            position = j * block + jnp.arange(block)
            visible = (position <= query_position[:, None]) & in_row[:, None]  # [t, block]
            if window is not None:
                visible &= position > query_position[:, None] - window
            k = k_pages.at[pages].get(mode="clip").reshape(block, num_kv_heads, h)
            v = v_pages.at[pages].get(mode="clip").reshape(block, num_kv_heads, h)
            scores = jnp.einsum("KGTH,SKH->KGTS", grouped, k.astype(jnp.float32))
            scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = jnp.exp(scores - base[..., None])
            decay = jnp.exp(top - base)
            written = position < seq_lens[row]
            v = jnp.where(written[:, None, None], v.astype(jnp.float32), 0.0)
            mixed = jnp.einsum("KGTS,SKH->KGTH", weights, v)
            total = total * decay + jnp.sum(weights, axis=-1)
            return new_top, total, acc * decay[..., None] + mixed

        shape = grouped.shape[:3]
        init = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(grouped.shape))
        _, total, acc = jax.lax.fori_loop(first, last, block_body, init)
        result = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
        result = result.transpose(2, 0, 1, 3).reshape(tile, n, h).astype(q.dtype)
        # Zeros past the row's end are overwritten by the rows after it, or stay as padding.
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return jax.lax.fori_loop(0, tile_ends[-1], tile_body, jnp.zeros_like(padded))[:t]
