"""paged_prefill on 8-bit pages: Triton converts those of the step's rows, Mosaic attends to them.

See ``converted.launch`` for why, and for what becomes of rows whose pages do not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.harness.registry import imported_when_called
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.page_scales_triton import values_of
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.paged_prefill import launch as attention
from pallas_kernels.paged_prefill.converted import launch
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.paged_prefill.triton import attend_tile, launch_of

TILE_BYTES = 8192  # of 8-bit keys, and as many of values, that a CTA converts at a time
CTAS_PER_SM = 8
ROWS_TILE = 64  # a CTA reads the ends of all rows at once, padded to at least this

_mosaic = imported_when_called(
    "pallas_kernels.paged_prefill.mosaic", "paged_prefill", attention.result_shapes
)


@triton.jit
def _convert(
    pages,  # [heads, H], of a page
    scales,  # float32[heads], of the page
    out,  # [heads, H], of the converted page
    heads,  # int32[HEADS]: of the page's tokens
    at,  # int32[HEADS, H]
    in_page,  # mask of heads
):
    entries = tl.load(pages + at, mask=in_page[:, None], other=0)
    of_heads = tl.load(scales + heads, mask=in_page, other=0.0)
    # Hopper converts two 8-bit floats to float16, which holds each of them, in one instruction.
    result = values_of(entries, tl.float16, True).to(tl.float32) * of_heads[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_page[:, None])


@triton.jit
def _convert_pages(
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    k_scales,  # float32[P, S, K]
    v_scales,  # float32[P, S, K]
    page_table,  # int32[R, M]
    ends,  # int32[R]
    shifts,  # int32[R]
    k_out,  # [C, S, K, H]
    v_out,  # [C, S, K, H]
    num_starts,  # R + 1, since jax-triton specialises on the integer 1
    table_width,  # M
    ROWS_TILE: tl.constexpr,  # at least R
    NUM_HEADS: tl.constexpr,  # of all tokens of a page: S * K
    HEADS: tl.constexpr,  # that are converted at a time
    HEAD_DIM: tl.constexpr,
):
    PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    rows = tl.arange(0, ROWS_TILE)
    row_ends = tl.load(ends + rows, mask=rows + 1 < num_starts, other=0)
    num_pages = tl.max(row_ends, 0)
    for item in range(tl.program_id(0), num_pages * PARTS, tl.num_programs(0)):
        page = item // PARTS
        row = tl.sum(((row_ends <= page) & (rows + 1 < num_starts)).to(tl.int32), 0)
        column = page + tl.load(shifts + row)
        source = tl.load(page_table + row * table_width + column).to(tl.int64) * NUM_HEADS
        target = (tl.full((), NUM_HEADS, tl.int64) * page) * HEAD_DIM
        heads = item % PARTS * HEADS + tl.arange(0, HEADS)
        at = heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        in_page = heads < NUM_HEADS
        k, v = k_pages + source * HEAD_DIM, v_pages + source * HEAD_DIM
        _convert(k, k_scales + source, k_out + target, heads, at, in_page)
        _convert(v, v_scales + source, v_out + target, heads, at, in_page)


@triton.jit
def _attend_rest(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    sinks,  # [N]; unused without HAS_SINKS
    k_scales,  # float32[P, S, K]
    v_scales,  # float32[P, S, K]
    first_row,  # int32[1]
    out,  # [T, N, H]: only of these rows and of padding
    num_tokens,
    num_starts,
    table_width,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    STARTS_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The outputs of the rows from ``first_row`` on, as ``paged_prefill.triton`` computes them."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, _, row_end, first_token = row_of_tile(  # type: ignore[misc]
        tile, query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if (first_token >= row_end) | (row < tl.load(first_row)):
        return
    attend_tile(
        q, k_pages, v_pages, page_table, seq_lens, sinks, k_scales, v_scales, out, row, row_end,
        first_token, num_starts, table_width, SCALE, CAP, WINDOW, HAS_SINKS, SCALED, NUM_KV_HEADS,
        GROUP, HEAD_DIM, DIM_TILE, VALUE_TILE, PAGE_SIZE, ROWS, TOKENS, BLOCK,
    )  # fmt: skip


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    return launch_with(launch.most_pages(args), args, _mosaic)


def launch_with(
    capacity: int, args: PrefillArgs, attend: Callable[[PrefillArgs], jax.Array]
) -> jax.Array:  # [T, N, H]
    """``paged_prefill`` with space for so many converted pages, to which ``attend`` attends."""
    assert args.k_scales is not None and args.v_scales is not None
    rows = launch.row_pages(args, capacity)
    out = attend(launch.converted_args(args, rows, *converted(args, rows, capacity)))
    if capacity >= args.page_table.size:  # all rows fit
        return out
    rest = jt.triton_call(
        args.q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.seq_lens,
        args.query_start_loc,
        args.seq_lens if args.sinks is None else args.sinks,
        args.k_scales,
        args.v_scales,
        rows.num_rows,
        kernel=_attend_rest,
        out_type=args.q,
        **launch_of(attention.choose_config(args), args),
    )
    token = jnp.arange(len(args.q))[:, None, None]
    return jnp.where(token < args.query_start_loc[rows.num_rows], out, rest)


def converted(
    args: PrefillArgs, rows: launch.RowPages, capacity: int
) -> tuple[jax.Array, jax.Array]:  # [C, S, K, H] each
    """The pages of ``rows`` in the dtype of the queries."""
    assert args.k_scales is not None and args.v_scales is not None
    _, page_size, num_kv_heads, head_dim = args.k_pages.shape
    num_rows, num_heads = args.seq_lens.shape[0], page_size * num_kv_heads
    heads = min(TILE_BYTES // head_dim, power_of_two(num_heads))
    pool = jax.ShapeDtypeStruct((capacity, page_size, num_kv_heads, head_dim), args.q.dtype)
    k_pages, v_pages = jt.triton_call(
        args.k_pages,
        args.v_pages,
        args.k_scales,
        args.v_scales,
        args.page_table,
        rows.ends,
        rows.shifts,
        kernel=_convert_pages,
        out_type=(pool, pool),
        grid=(min(CTAS_PER_SM * current_device().num_sms, capacity * -(-num_heads // heads)),),
        num_warps=4,
        num_stages=1,
        num_starts=num_rows + 1,
        table_width=args.page_table.shape[1],
        ROWS_TILE=max(ROWS_TILE, power_of_two(num_rows)),
        NUM_HEADS=num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
    )
    return k_pages, v_pages
