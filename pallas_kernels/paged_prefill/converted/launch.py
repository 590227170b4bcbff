"""Which calls of paged_prefill convert their 8-bit pages first, and where the pages of rows go.

The rows' pages are written as 16-bit pages to an array of a bounded size, which the Mosaic kernel
reads with a page table of its own. Rows whose pages do not fit there are left to the Triton kernel,
which reads 8-bit pages. Imports neither Triton nor Mosaic.

A Mosaic kernel that converts pages itself would do so once for each tile of 64 tokens that sees
them, in every CTA (what one CTA converts, TMA does not multicast), with registers that its compute
warpgroups need. A page that is converted beforehand is converted once a layer: 2,112 bytes of a
token of Qwen3-4B are read and 4,096 written, so at 4 TB/s (H200) 13 us for 8,192 tokens of context
and 25 us for 16,384, next to 1 and 2.8 ms of attention (8,192 queries). About 100 queries of a row
gain as much by Mosaic's kernel as its pages take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.paged_prefill.launch import (
    BLOCK,
    TOKEN_ALIGNMENT,
    mosaic_supports,
    triton_supports,
)
from pallas_kernels.paged_prefill.ref import FEW_TOKENS, PrefillArgs

MOST_BYTES = 256 << 20  # of converted pages: 65,536 tokens of Qwen3-4B


@dataclass(frozen=True)
class RowPages:
    """Where the pages of each row go: converted page p of row r is column p + ``shifts[r]`` of its
    page table. The pages of rows are adjacent, in the order of rows.
    """

    ends: jax.Array  # int32[R]: one past the row's last converted page; rows that do not fit: none
    shifts: jax.Array  # int32[R]
    num_rows: jax.Array  # int32[1]: the rows that fit, which come first


def supports(args: PrefillArgs) -> str | None:
    """Why a call cannot convert its pages, or None."""
    if reason := triton_supports(args):
        return reason
    if args.k_scales is None:
        return f"pages are {args.k_pages.dtype}, not 8-bit floats"
    if args.q.shape[0] <= FEW_TOKENS:
        return f"{args.q.shape[0]} queries, no more than {FEW_TOKENS}, read each page too few times"
    return mosaic_supports(_as_converted(args))


def _as_converted(args: PrefillArgs) -> PrefillArgs:
    """The shapes of the call that the Mosaic kernel gets."""
    pool = jax.ShapeDtypeStruct(args.k_pages.shape, args.q.dtype)
    return replace(args, k_pages=pool, v_pages=pool, k_scales=None, v_scales=None)


def most_pages(args: PrefillArgs) -> int:
    """The size of the array of converted pages: those of all rows, if they are few enough."""
    return min(args.page_table.size, MOST_BYTES // _page_bytes(args))


def _page_bytes(args: PrefillArgs) -> int:
    """The bytes of a converted page of keys and one of values."""
    _, page_size, num_kv_heads, head_dim = args.k_pages.shape
    return 2 * page_size * num_kv_heads * head_dim * args.q.dtype.itemsize


def workspace(args: PrefillArgs) -> int:
    """The bytes of the converted pages, and of the outputs of rows that may not fit."""
    pages = most_pages(args)
    others = pages < args.page_table.size
    return pages * _page_bytes(args) + others * args.q.size * args.q.dtype.itemsize


def row_pages(args: PrefillArgs, capacity: int) -> RowPages:
    """The places of the pages that the rows' queries see, ``capacity`` of them at most.

    With a window the first page is the first of a block of keys, which the Mosaic kernel reads
    whole. A tile of that kernel may begin with tokens of the previous row, fewer than
    ``TOKEN_ALIGNMENT``, which see as many keys more.
    """
    page_size = args.k_pages.shape[1]
    num_queries = args.query_start_loc[1:] - args.query_start_loc[:-1]
    first = jnp.zeros_like(args.seq_lens)
    if args.window is not None:
        oldest = args.seq_lens - num_queries - (TOKEN_ALIGNMENT - 1) - args.window + 1
        first = jnp.maximum(oldest, 0) // BLOCK * (BLOCK // page_size)
    counts = jnp.where(num_queries > 0, (args.seq_lens + (page_size - 1)) // page_size - first, 0)
    row = jnp.arange(len(counts))
    ends = jnp.sum(jnp.where(row <= row[:, None], counts, 0), axis=1, dtype=jnp.int32)
    fits = ends <= capacity
    used = jnp.max(jnp.where(fits, ends, 0))
    num_rows = jnp.sum(fits, dtype=jnp.int32, keepdims=True)
    return RowPages(jnp.minimum(ends, used), first - (ends - counts), num_rows)


def converted_args(
    args: PrefillArgs,
    rows: RowPages,
    k_pages: jax.Array,  # [C, S, K, H]: the converted pages
    v_pages: jax.Array,  # [C, S, K, H]
) -> PrefillArgs:
    """The call of the rows that fit, on their converted pages. Tokens of others are padding."""
    columns = jnp.arange(args.page_table.shape[1], dtype=jnp.int32)
    # Columns before a row's first page and past its last are not read.
    table = jnp.clip(columns - rows.shifts[:, None], 0, len(k_pages) - 1)
    starts = args.query_start_loc
    pools = {"k_pages": k_pages, "v_pages": v_pages, "k_scales": None, "v_scales": None}
    return replace(
        args,
        **pools,
        page_table=table,
        query_start_loc=jnp.minimum(starts, starts[rows.num_rows]),
    )
