"""Which row of packed tokens a CTA has, in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of_tile(
    tile,
    query_start_loc,  # int32[R + 1]
    num_tokens,  # T
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,  # at least R + 1
    TOKENS: tl.constexpr,  # of a tile
):
    """The row of a tile, its first token and end, and the tile's first token.

    Row r has the tiles from query_start_loc[r] // TOKENS + r on: at least as many as it needs. The
    padding after the last row is one more row.
    """
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    owned = (starts // TOKENS + rows <= tile) & (rows < num_starts)
    row = tl.sum(owned.to(tl.int32), 0) - 1
    row_start = tl.load(query_start_loc + row)
    row_end = tl.load(query_start_loc + row + 1, mask=row + 1 < num_starts, other=num_tokens)
    return row, row_start, row_end, row_start + (tile - row_start // TOKENS - row) * TOKENS
