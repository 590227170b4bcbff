"""paged_prefill in Triton, for NVIDIA GPUs from compute capability 8.0 on.

One program takes a tile of one row's queries for one kv head: consecutive tokens with all the query
heads that share the kv head, so that a key read once serves them all. It finds its row from
``query_start_loc`` itself: the grid follows the bucket alone, and programs without queries leave.
Keys that every query of the tile sees are taken without masks, those about the diagonal and the
window's edge with them (FlashAttention-2: Dao, 2023, arXiv:2307.08691). Softmax runs in base 2,
sums in float32.
"""

from __future__ import annotations

import math

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.numerics import power_of_two
from pallas_kernels.paged_prefill import launch


@triton.jit
def _attend_blocks(
    query,  # [ROWS, DIM_TILE]
    newest,  # int32[ROWS]: the last position that each query sees
    top,  # float32[ROWS]: largest score so far
    total,  # float32[ROWS]: sum of weights
    acc,  # float32[ROWS, DIM_TILE]: sum of weights * values
    k_pages,  # [P, S, K, H], of one kv head
    v_pages,  # [P, S, K, H], of one kv head
    page_ids,  # int32[M] of the row
    start,
    end,
    SCALE: tl.constexpr,  # of scores, log2(e) included; positive
    WINDOW: tl.constexpr,  # 0: everything
    SLOT_STRIDE: tl.constexpr,  # K * H
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # or every query sees all keys from start to end, whole blocks
):
    keys = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_TILE)
    for first in range(start, end, BLOCK):
        position = first + keys
        if MASKED:
            written = position < end
            page = tl.load(page_ids + position // PAGE_SIZE, mask=written, other=0)
            readable = written[:, None] & (dims < HEAD_DIM)[None, :]
        else:
            page = tl.load(page_ids + position // PAGE_SIZE)
            if HEAD_DIM < DIM_TILE:
                readable = (dims < HEAD_DIM)[None, :] & (keys >= 0)[:, None]
            else:
                readable = None
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE  # bytes pass 2**31
        at_key = (slot * SLOT_STRIDE)[:, None] + dims[None, :]
        if readable is None:
            k = tl.load(k_pages + at_key).to(query.dtype)
        else:
            k = tl.load(k_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = position[None, :] <= newest[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] > newest[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
        base = new_top
        if MASKED and WINDOW > 0:
            # A query whose window begins later has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores * SCALE - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if readable is None:
            v = tl.load(v_pages + at_key).to(query.dtype)
        else:
            v = tl.load(v_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), v, acc, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _attend_tile(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    out,  # [T, N, H]
    num_tokens,  # T; these three are no constants: a kernel for all buckets
    num_starts,  # R + 1, and not R, as 1 is a constant to jax-triton
    table_width,  # M
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS_TILE: tl.constexpr,  # at least R + 1
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile: (token, query head) pairs
    TOKENS: tl.constexpr,  # of the tile: ROWS // GROUP
    BLOCK: tl.constexpr,  # keys of one step of the loop
):
    kv_head = tl.program_id(0)
    # The longest tiles, those that end a row, come first: late ones would keep the chip waiting.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Row r owns the tiles from query_start_loc[r] // TOKENS + r on: at least as many as it fills.
    # The padding behind the last row is one more row, of no context.
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    owned = (starts // TOKENS + rows <= tile) & (rows < num_starts)
    row = tl.sum(owned.to(tl.int32), 0) - 1
    row_start = tl.load(query_start_loc + row)
    is_row = row + 1 < num_starts  # or padding
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
    if k_pages.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float. Hopper widens two to it in one instruction, and to
        # bfloat16 only by way of it, one by one. Queries past 65504 would overflow.
        query = query.to(tl.float16)

    # Keys before `common` some queries see no more, keys from `diagonal` on some do not see yet;
    # between them lie whole blocks that every query sees.
    start = 0
    common = 0
    if WINDOW > 0:
        start = tl.maximum(position - WINDOW + 1, 0)
        ahead = tl.maximum(end - WINDOW - start, 0)
        common = tl.minimum(start + tl.cdiv(ahead, BLOCK) * BLOCK, end)
    diagonal = common + tl.maximum(position + 1 - common, 0) // BLOCK * BLOCK

    newest = position + token
    k_head = k_pages + kv_head * HEAD_DIM
    v_head = v_pages + kv_head * HEAD_DIM
    page_ids = page_table + row * table_width
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_TILE), tl.float32)
    if WINDOW > 0:
        top, total, acc = _attend_blocks(
            query, newest, top, total, acc, k_head, v_head, page_ids, start, common,
            SCALE, WINDOW, SLOT_STRIDE, HEAD_DIM, DIM_TILE, PAGE_SIZE, BLOCK, True,
        )  # fmt: skip
    top, total, acc = _attend_blocks(
        query, newest, top, total, acc, k_head, v_head, page_ids, common, diagonal,
        SCALE, WINDOW, SLOT_STRIDE, HEAD_DIM, DIM_TILE, PAGE_SIZE, BLOCK, False,
    )  # fmt: skip
    top, total, acc = _attend_blocks(
        query, newest, top, total, acc, k_head, v_head, page_ids, diagonal, end,
        SCALE, WINDOW, SLOT_STRIDE, HEAD_DIM, DIM_TILE, PAGE_SIZE, BLOCK, True,
    )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # padding has seen nothing
    tl.store(out + at_tile + at_query, result.to(out.dtype.element_ty), mask=inside)


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
    args = (q, k_pages, v_pages, page_table, seq_lens, query_start_loc)
    return launched(launch.choose(q, k_pages, seq_lens), *args, scale=scale, window=window)


def launched(
    choice: launch.Launch,
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
    """``paged_prefill`` cut up as ``choice`` says; for it and for a tuner."""
    (t, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    num_seqs, table_width = page_table.shape
    num_starts = num_seqs + 1
    group = n // num_kv_heads
    tokens = choice.rows // group
    return jt.triton_call(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        query_start_loc,
        kernel=_attend_tile,
        out_type=q,
        grid=(num_kv_heads, t // tokens + num_starts),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        SCALE=scale * math.log2(math.e),
        WINDOW=window or 0,
        num_tokens=t,
        num_starts=num_starts,
        table_width=table_width,
        STARTS_TILE=max(launch.STARTS_TILE, power_of_two(num_starts)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=h,
        DIM_TILE=power_of_two(h),
        PAGE_SIZE=page_size,
        ROWS=choice.rows,
        TOKENS=tokens,
        BLOCK=choice.block,
    )
