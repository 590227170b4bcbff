"""A tile of paged_prefill in Triton: consecutive tokens of a row, for one kv head.

The kernels differ in which CTA has which tile and which of its keys, and in what becomes of the
tile's state. Blocks that every query of the tile sees need no mask; those at the diagonal and at
the window's edge are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.lib.attention_triton import (
    capped,
    finite,
    is_visible,
    result_of,
    slots_of,
)
from pallas_kernels.lib.page_scales_triton import SMALLEST_SCALE, exponents_of, values_of


@triton.jit
def context_of(
    first_token,  # of the tile
    row_end,
    length,  # of the row's context
    TOKENS: tl.constexpr,
):
    """The number of a tile's tokens, and the position of the first one in its context."""
    return tl.minimum(row_end - first_token, TOKENS), length - (row_end - first_token)


@triton.jit
def oldest_key(
    position,  # of a tile's first query
    WINDOW: tl.constexpr,  # 0: no window
):
    """The first key that a query of the tile sees."""
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0


@triton.jit
def offsets_of(
    first_token,  # of the tile
    kv_head,
    pair,  # int32[ROWS]: (token, query head) pairs
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where the tile is in queries and outputs (int64), and its pairs in the tile (int32[ROWS])."""
    at_tile = (first_token.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    return at_tile, (pair // GROUP * (NUM_KV_HEADS * GROUP) + pair % GROUP) * HEAD_DIM


@triton.jit
def load_queries(
    q,  # of the tile
    in_tile,  # int32[ROWS]: see ``offsets_of``
    in_count,  # mask of pairs
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The queries [ROWS, DIM_TILE] of a tile."""
    dims = tl.arange(0, DIM_TILE)
    inside = in_count[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + (in_tile[:, None] + dims[None, :]), mask=inside, other=0.0)
    if SCALED and q.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float. Hopper converts two to float16 in one instruction, but to
        # bfloat16 one by one, through float16. Queries above 65504 would overflow.
        query = query.to(tl.float16)
    return query


@triton.jit
def store_result(
    out,  # of the tile
    in_tile,  # int32[ROWS]: see ``offsets_of``
    columns,  # int32[VALUE_TILE]
    in_count,  # mask of pairs
    l_i,
    acc,  # float32[ROWS, VALUE_TILE]
    HEAD_DIM: tl.constexpr,
):
    """Store the output of a tile that has seen all its keys."""
    inside = in_count[:, None] & (columns < HEAD_DIM)[None, :]
    result = result_of(l_i, acc).to(out.dtype.element_ty)
    tl.store(out + (in_tile[:, None] + columns[None, :]), result, mask=inside)


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
            readable = written[:, None] & (dims < HEAD_DIM)[None, :]
            usable = written[:, None] & (columns < HEAD_DIM)[None, :]
        else:
            written = None
            if HEAD_DIM < DIM_TILE:
                readable = (dims < HEAD_DIM)[None, :] & (keys >= 0)[:, None]
                usable = (columns < HEAD_DIM)[None, :] & (keys >= 0)[:, None]
            else:
                readable = None
                usable = None
        slot = slots_of(page_ids, position, written, PAGE_SIZE, MASKED)
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
            scores = capped(scores, CAP)
        if MASKED:
            scores = tl.where(is_visible(position, last_key, WINDOW), scores, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(scores, 1) * SCALE)
        base = m_ij
        if MASKED and (WINDOW > 0 or SPLIT):
            # A query that sees no key up to this block has m_ij = -inf: -inf - -inf is NaN.
            base = finite(m_ij)
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
