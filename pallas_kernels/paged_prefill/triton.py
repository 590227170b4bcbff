"""paged_prefill in Triton, for NVIDIA GPUs from compute capability 8.0 on.

A CTA has a tile of one row's queries for one kv head: consecutive tokens with all query heads that
share the kv head, so a key is read once for all of them. Of wide heads several CTAs have the same
tile, each for some of the values' columns. A CTA finds its row from ``query_start_loc``: the grid
depends on the bucket only, and CTAs without queries return. See ``paged_prefill.tile`` for what
becomes of a tile.
"""

from __future__ import annotations

from typing import Any

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.attention_triton import first_state
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.paged_prefill import launch
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.paged_prefill.tile import (
    attend_keys,
    context_of,
    load_queries,
    offsets_of,
    oldest_key,
    store_result,
)


@triton.jit
def attend_tile(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    sinks,  # [N]; unused without HAS_SINKS
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    out,  # [T, N, H]
    row,  # of the tile, which has tokens; R: padding
    row_end,
    first_token,  # of the tile
    num_starts,
    table_width,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
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
    """The outputs of a CTA's tile."""
    PARTS: tl.constexpr = DIM_TILE // VALUE_TILE  # CTAs of a tile, which divide the values' columns
    kv_head = tl.program_id(0) // PARTS
    columns = tl.program_id(0) % PARTS * VALUE_TILE + tl.arange(0, VALUE_TILE)
    length = tl.load(seq_lens + row, mask=row + 1 < num_starts, other=0)  # 0: padding
    count, position = context_of(  # type: ignore[misc]
        first_token, row_end, length, TOKENS
    )
    end = position + count
    start = oldest_key(position, WINDOW)

    pair = tl.arange(0, ROWS)
    token = pair // GROUP
    at_tile, in_tile = offsets_of(first_token, kv_head, pair, NUM_KV_HEADS, GROUP, HEAD_DIM)
    query = load_queries(q + at_tile, in_tile, token < count, HEAD_DIM, DIM_TILE, SCALED)
    m_i, l_i = first_state(sinks, kv_head * GROUP + pair % GROUP, HAS_SINKS, ROWS)
    m_i, l_i, acc = attend_keys(
        query, position, token, m_i, l_i, k_pages + kv_head * HEAD_DIM,
        v_pages + kv_head * HEAD_DIM, k_scales + kv_head, v_scales + kv_head, columns,
        page_table + row * table_width, start, end, start, end, SCALE, CAP, WINDOW, SCALED,
        NUM_KV_HEADS, HEAD_DIM, DIM_TILE, VALUE_TILE, PAGE_SIZE, ROWS, BLOCK, False,
    )  # fmt: skip
    store_result(out + at_tile, in_tile, columns, token < count, l_i, acc, HEAD_DIM)


@triton.jit
def _attend_tile(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    sinks,  # [N]; unused without HAS_SINKS
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    out,  # [T, N, H]
    num_tokens,  # T; this and the next two are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1 instead of R, since jax-triton specialises on the integer 1
    table_width,  # M
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    STARTS_TILE: tl.constexpr,  # at least R + 1
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,  # columns of values of the CTA
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # (token, query head) pairs of the tile
    TOKENS: tl.constexpr,  # tokens of the tile: ROWS // GROUP
    BLOCK: tl.constexpr,  # keys per loop iteration
):
    # The longest tiles, those at the end of a row, come first, so none runs alone at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, _, row_end, first_token = row_of_tile(  # type: ignore[misc]
        tile, query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first_token >= row_end:
        return
    attend_tile(
        q, k_pages, v_pages, page_table, seq_lens, sinks, k_scales, v_scales, out, row, row_end,
        first_token, num_starts, table_width, SCALE, CAP, WINDOW, HAS_SINKS, SCALED, NUM_KV_HEADS,
        GROUP, HEAD_DIM, DIM_TILE, VALUE_TILE, PAGE_SIZE, ROWS, TOKENS, BLOCK,
    )  # fmt: skip


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(config: launch.TritonConfig, args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """``paged_prefill`` with a given configuration; the tuner calls it too."""
    return jt.triton_call(
        args.q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.seq_lens,
        args.query_start_loc,
        args.seq_lens if args.sinks is None else args.sinks,
        args.seq_lens if args.k_scales is None else args.k_scales,
        args.seq_lens if args.v_scales is None else args.v_scales,
        kernel=_attend_tile,
        out_type=args.q,
        **launch_of(config, args),
    )


def launch_of(config: launch.TritonConfig, args: PrefillArgs) -> dict[str, Any]:
    """The grid and the other parameters of a launch with a CTA for each tile."""
    (t, _, h), num_starts = args.q.shape, args.query_start_loc.shape[0]
    sizes, value_tile = launch.sizes_of(args.q, args, config), config.value_tile(h)
    parts = sizes["DIM_TILE"] // value_tile
    return {
        "grid": (sizes["NUM_KV_HEADS"] * parts, t // sizes["TOKENS"] + num_starts),
        "num_tokens": t,
        "num_starts": num_starts,
        "SCALED": args.k_scales is not None,
        "STARTS_TILE": max(launch.STARTS_TILE, power_of_two(num_starts)),
        "VALUE_TILE": value_tile,
        **sizes,
    }
