"""paged_prefill in Triton, for NVIDIA GPUs from compute capability 8.0 on.

A CTA has a tile of one row's queries for one kv head: consecutive tokens with all query heads that
share the kv head, so a key is read once for all of them. Of wide heads several CTAs have the same
tile, each for some of the values' columns. A CTA finds its row from ``query_start_loc``: the grid
depends on the bucket only, and CTAs without queries return. Blocks that every query of the tile
sees need no mask; those at the diagonal and at the window's edge are masked (FlashAttention-2: Dao,
2023, arXiv:2307.08691). Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.page_scales_triton import SMALLEST_SCALE, exponents_of, values_of
from pallas_kernels.paged_prefill import launch
from pallas_kernels.paged_prefill.ref import PrefillArgs

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """c tanh(scores / c) with c = CAP."""
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 * LOG2_E / CAP)) + 1.0)


@triton.jit
def _attend_blocks(
    query,  # [ROWS, DIM_TILE]
    last_key,  # int32[ROWS]: position of the last visible key of each query
    m_i,  # float32[ROWS]: largest score so far
    l_i,  # float32[ROWS]: sum of exp2(score - m_i)
    acc,  # float32[ROWS, VALUE_TILE]: sum of exp2(score - m_i) * value
    k_pages,  # [P, S, K, H], of one kv head
    v_pages,  # [P, S, K, H], of one kv head
    k_scales,  # float32[P, S, K], of one kv head; unused without SCALED
    v_scales,  # float32[P, S, K], of one kv head; unused without SCALED
    unit,  # of acc, as a power of two: that of the largest scale of values so far
    columns,  # int32[VALUE_TILE]: components of values
    page_ids,  # int32[M] of the row
    start,
    end,
    SCALE: tl.constexpr,  # of scores, times log2(e); positive
    CAP: tl.constexpr,  # of scores before they are scaled; 0: no cap
    WINDOW: tl.constexpr,  # 0: no window
    SCALED: tl.constexpr,  # pages are the bits of 8-bit floats, with scales
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # False: start to end are whole blocks that every query sees
    SPLIT: tl.constexpr,  # the first key need not be visible to every query
):
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    keys = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_TILE)
    for first in range(start, end, BLOCK):
        position = first + keys
        if MASKED:
            written = position < end
            page = tl.load(page_ids + position // PAGE_SIZE, mask=written, other=0)
            readable = written[:, None] & (dims < HEAD_DIM)[None, :]
            usable = written[:, None] & (columns < HEAD_DIM)[None, :]
        else:
            page = tl.load(page_ids + position // PAGE_SIZE)
            if HEAD_DIM < DIM_TILE:
                readable = (dims < HEAD_DIM)[None, :] & (keys >= 0)[:, None]
                usable = (columns < HEAD_DIM)[None, :] & (keys >= 0)[:, None]
            else:
                readable = None
                usable = None
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE  # offsets exceed int32
        at_key = (slot * SLOT_STRIDE)[:, None] + dims[None, :]
        at_value = (slot * SLOT_STRIDE)[:, None] + columns[None, :]
        if readable is None:
            k = values_of(tl.load(k_pages + at_key), query.dtype, SCALED)
        else:
            entries = tl.load(k_pages + at_key, mask=readable, other=0)
            k = values_of(entries, query.dtype, SCALED)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if SCALED:
            at_scale = slot * NUM_KV_HEADS
            if MASKED:
                of_keys = tl.load(k_scales + at_scale, mask=written, other=0.0)
                of_values = tl.load(v_scales + at_scale, mask=written, other=0.0)
            else:
                of_keys = tl.load(k_scales + at_scale)
                of_values = tl.load(v_scales + at_scale)
            scores *= of_keys[None, :]
        if CAP > 0:
            scores = _capped(scores, CAP)
        if MASKED:
            visible = position[None, :] <= last_key[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] > last_key[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(scores, 1) * SCALE)
        base = m_ij
        if MASKED and (WINDOW > 0 or SPLIT):
            # A query that sees no key up to this block has m_ij = -inf: -inf - -inf is NaN.
            base = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        alpha = tl.exp2(m_i - base)
        if SCALED:
            # p over 2^unit, times the scales of values: less than 2, so that 16 bits hold it
            before = unit
            unit = tl.maximum(unit, exponents_of(tl.max(of_values, 0)))
            p = tl.exp2(scores * SCALE - (base + unit)[:, None])
            l_i = l_i * alpha + tl.sum(p, 1) * tl.exp2(unit)
            alpha *= tl.exp2(before - unit)
            p *= of_values[None, :]
        else:
            p = tl.exp2(scores * SCALE - base[:, None])
            l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if usable is None:
            v = values_of(tl.load(v_pages + at_value), query.dtype, SCALED)
        else:
            entries = tl.load(v_pages + at_value, mask=usable, other=0)
            v = values_of(entries, query.dtype, SCALED)
        acc = tl.dot(p.to(query.dtype), v, acc, input_precision="ieee")
        m_i = m_ij
    return m_i, l_i, acc, unit


@triton.jit
def attend_keys(
    query,  # [ROWS, DIM_TILE]
    position,  # of the tile's first query in its context
    token,  # int32[ROWS]: of each query in the tile
    m_i,  # float32[ROWS]
    l_i,  # float32[ROWS]
    k_pages,  # [P, S, K, H], of one kv head
    v_pages,  # [P, S, K, H], of one kv head
    k_scales,  # float32[P, S, K], of one kv head; unused without SCALED
    v_scales,  # float32[P, S, K], of one kv head; unused without SCALED
    columns,  # int32[VALUE_TILE]: components of values
    page_ids,  # int32[M] of the row
    start,  # the tile's first key ...
    end,  # ... and one past its last
    lower,  # first key of a split, whole blocks after start; start without SPLIT
    upper,  # one past its last, whole blocks after lower or end; end without SPLIT
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """m_i, l_i and acc after the keys from ``lower`` to ``upper``.

    Some queries do not see keys before `common` (window) or from `diagonal` on (causality); between
    them are whole blocks that every query sees.
    """
    common = start
    if WINDOW > 0:
        ahead = tl.maximum(end - WINDOW - start, 0)
        common = tl.minimum(start + tl.cdiv(ahead, BLOCK) * BLOCK, end)
    diagonal = common + tl.maximum(position + 1 - common, 0) // BLOCK * BLOCK
    if SPLIT:
        common = tl.minimum(tl.maximum(common, lower), upper)
        diagonal = tl.minimum(tl.maximum(diagonal, lower), upper)
    last_key = position + token
    unit = exponents_of(tl.full((), SMALLEST_SCALE, tl.float32))
    acc = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    if WINDOW > 0:
        m_i, l_i, acc, unit = _attend_blocks(
            query, last_key, m_i, l_i, acc, k_pages, v_pages, k_scales, v_scales, unit, columns,
            page_ids, lower, common, SCALE, CAP, WINDOW, SCALED, NUM_KV_HEADS, HEAD_DIM, DIM_TILE,
            PAGE_SIZE, BLOCK, True, SPLIT,
        )  # fmt: skip
    m_i, l_i, acc, unit = _attend_blocks(
        query, last_key, m_i, l_i, acc, k_pages, v_pages, k_scales, v_scales, unit, columns,
        page_ids, common, diagonal, SCALE, CAP, WINDOW, SCALED, NUM_KV_HEADS, HEAD_DIM, DIM_TILE,
        PAGE_SIZE, BLOCK, False, SPLIT,
    )  # fmt: skip
    m_i, l_i, acc, unit = _attend_blocks(
        query, last_key, m_i, l_i, acc, k_pages, v_pages, k_scales, v_scales, unit, columns,
        page_ids, diagonal, upper, SCALE, CAP, WINDOW, SCALED, NUM_KV_HEADS, HEAD_DIM, DIM_TILE,
        PAGE_SIZE, BLOCK, True, SPLIT,
    )  # fmt: skip
    if SCALED:
        acc *= tl.exp2(unit)
    return m_i, l_i, acc


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
    PARTS: tl.constexpr = DIM_TILE // VALUE_TILE  # CTAs of a tile, which divide the values' columns
    kv_head = tl.program_id(0) // PARTS
    columns = tl.program_id(0) % PARTS * VALUE_TILE + tl.arange(0, VALUE_TILE)
    # The longest tiles, those at the end of a row, come first, so none runs alone at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Row r has the tiles from query_start_loc[r] // TOKENS + r on: at least as many as it needs.
    # The padding after the last row is one more row, without context.
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    owned = (starts // TOKENS + rows <= tile) & (rows < num_starts)
    row = tl.sum(owned.to(tl.int32), 0) - 1
    row_start = tl.load(query_start_loc + row)
    is_row = row + 1 < num_starts  # False for padding
    row_end = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens)
    first_token = row_start + (tile - row_start // TOKENS - row) * TOKENS
    if first_token >= row_end:
        return
    length = tl.load(seq_lens + row, mask=is_row, other=0)
    count = tl.minimum(row_end - first_token, TOKENS)
    position = length - (row_end - first_token)  # of the first query in its context
    end = position + count

    pair = tl.arange(0, ROWS)
    token = pair // GROUP
    dims = tl.arange(0, DIM_TILE)
    inside = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    at_tile = (first_token.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    in_tile = (token * (NUM_KV_HEADS * GROUP) + pair % GROUP) * HEAD_DIM
    at_query = in_tile[:, None] + dims[None, :]
    query = tl.load(q + at_tile + at_query, mask=inside, other=0.0)
    if SCALED and q.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float. Hopper converts two to float16 in one instruction, but to
        # bfloat16 one by one, through float16. Queries above 65504 would overflow.
        query = query.to(tl.float16)

    start = 0
    if WINDOW > 0:
        start = tl.maximum(position - WINDOW + 1, 0)
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        m_i = tl.load(sinks + kv_head * GROUP + pair % GROUP).to(tl.float32) * LOG2_E
        l_i += 1.0
    m_i, l_i, acc = attend_keys(
        query, position, token, m_i, l_i, k_pages + kv_head * HEAD_DIM,
        v_pages + kv_head * HEAD_DIM, k_scales + kv_head, v_scales + kv_head, columns,
        page_table + row * table_width, start, end, start, end, SCALE, CAP, WINDOW, SCALED,
        NUM_KV_HEADS, HEAD_DIM, DIM_TILE, VALUE_TILE, PAGE_SIZE, ROWS, BLOCK, False,
    )  # fmt: skip
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # padding has l_i = 0
    at_result = in_tile[:, None] + columns[None, :]
    inside = (token < count)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(out + at_tile + at_result, result.to(out.dtype.element_ty), mask=inside)


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(config: launch.TritonConfig, args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """``paged_prefill`` with a given configuration; the tuner calls it too."""
    (t, n, h), (page_size, num_kv_heads) = args.q.shape, args.k_pages.shape[1:3]
    num_seqs, table_width = args.page_table.shape
    num_starts = num_seqs + 1
    group = n // num_kv_heads
    tokens = config.rows // group
    dim_tile = power_of_two(h)
    value_tile = min(config.value_columns or dim_tile, dim_tile)
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
        grid=(num_kv_heads * (dim_tile // value_tile), t // tokens + num_starts),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=args.scale * LOG2_E.value,
        CAP=(args.cap or 0.0) / args.scale,
        WINDOW=args.window or 0,
        HAS_SINKS=args.sinks is not None,
        SCALED=args.k_scales is not None,
        num_tokens=t,
        num_starts=num_starts,
        table_width=table_width,
        STARTS_TILE=max(launch.STARTS_TILE, power_of_two(num_starts)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=h,
        DIM_TILE=dim_tile,
        VALUE_TILE=value_tile,
        PAGE_SIZE=page_size,
        ROWS=config.rows,
        TOKENS=tokens,
        BLOCK=config.block,
    )
