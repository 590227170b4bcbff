"""paged_decode in Triton, for NVIDIA GPUs from compute capability 8.0 on.

One program reads one span of one row's keys for one kv head, with all of that head's queries in
one tile (padded to 16, the smallest tile of the matrix units), so each key and value is read once.
With few rows a context is cut into several spans, whose results a second kernel combines
(flash-decoding: Dao et al., 2023). Softmax runs in base 2, sums in float32.
Must not know: how spans and tiles are chosen (``launch``).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.paged_decode import launch
from pallas_kernels.tiles import power_of_two

SMALLEST_TILE = 16  # of tl.dot, in every direction


@triton.jit
def _attend_span(
    q,  # [B, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[B, M]
    seq_lens,  # int32[B]
    mixed,  # float32[B, K, SPLITS, G, H]; with one span the result itself, [B, N, H]
    sums,  # float32[B, K, SPLITS, 2, G]: largest score, sum of weights; unused with one span
    SCALE: tl.constexpr,  # of scores, log2(e) included
    WINDOW: tl.constexpr,  # 0: everything
    TABLE_WIDTH: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # keys of one step of the loop
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(seq_lens + row)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    per_split = tl.cdiv(tl.cdiv(length - oldest, SPLITS), BLOCK) * BLOCK
    start = oldest + split * per_split
    end = tl.minimum(start + per_split, length)

    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    keys = tl.arange(0, BLOCK)
    in_head = (dims < HEAD_DIM)[None, :]
    in_group = (heads < GROUP)[:, None] & in_head
    query_head = (row * NUM_KV_HEADS + kv_head) * GROUP + heads
    at_query = query_head[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + at_query, mask=in_group, other=0.0)
    if k_pages.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float. Hopper widens two to it in one instruction, and to
        # bfloat16 only by way of it, one by one. Queries past 65504 would overflow.
        query = query.to(tl.float16)

    top = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    for first in range(start, end, BLOCK):
        position = first + keys
        seen = position < end
        page = tl.load(page_table + row * TABLE_WIDTH + position // PAGE_SIZE, mask=seen, other=0)
        slot = (page * PAGE_SIZE + position % PAGE_SIZE).to(tl.int64)  # bytes pass 2**31
        at_key = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        readable = seen[:, None] & in_head
        k = tl.load(k_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * SCALE
        # The first key of a block is always seen, so the new top is never -inf.
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        v = tl.load(v_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        mix = tl.dot(weights.to(query.dtype), v, input_precision="ieee")
        acc = acc * shrink[:, None] + mix
        total = total * shrink + tl.sum(weights, 1)
        top = new_top

    if SPLITS == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row of length 0 yields zeros
        tl.store(mixed + at_query, result.to(mixed.dtype.element_ty), mask=in_group)
    else:
        span = (row * NUM_KV_HEADS + kv_head) * SPLITS + split
        at_sum = span * 2 * GROUP + heads
        tl.store(sums + at_sum, top, mask=heads < GROUP)
        tl.store(sums + at_sum + GROUP, total, mask=heads < GROUP)
        if start < end:
            at_mixed = (span * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(mixed + at_mixed, acc, mask=in_group)


@triton.jit
def _combine_spans(
    mixed,  # float32[B, K, SPLITS, G, H]
    sums,  # float32[B, K, SPLITS, 2, G]
    out,  # [B, N, H]
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
):
    query_head = tl.program_id(0)
    splits = tl.arange(0, SPLITS_TILE)
    dims = tl.arange(0, DIM_TILE)
    span = (query_head // GROUP) * SPLITS + splits
    head = query_head % GROUP
    at_sum = span * 2 * GROUP + head
    top = tl.load(sums + at_sum, mask=splits < SPLITS, other=float("-inf"))
    total = tl.load(sums + at_sum + GROUP, mask=splits < SPLITS, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # a row of length 0
    weights = tl.exp2(top - highest)
    # A span without keys wrote no mixture: whatever lies there is not read.
    wanted = (total > 0.0)[:, None] & (dims < HEAD_DIM)[None, :]
    at_mixed = (span * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(mixed + at_mixed, mask=wanted, other=0.0)
    whole = tl.sum(total * weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + query_head * HEAD_DIM + dims, result.to(out.dtype.element_ty), dims < HEAD_DIM)


def paged_decode(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [B, N, H]
    """See ``paged_decode.api``."""
    choice = launch.choose(q, k_pages, page_table)
    return launched(choice, q, k_pages, v_pages, page_table, seq_lens, scale=scale, window=window)


def launched(
    choice: launch.Launch,
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [B, N, H]
    """``paged_decode`` cut up as ``choice`` says; for it and for the tuner."""
    (b, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    group = n // num_kv_heads
    split = choice.splits > 1
    parts = (b, num_kv_heads, choice.splits)
    mixed = jax.ShapeDtypeStruct((*parts, group, h), jnp.float32)
    sums = jax.ShapeDtypeStruct((*parts, 2, group), jnp.float32)
    sizes: dict[str, Any] = {"GROUP": group, "HEAD_DIM": h, "DIM_TILE": power_of_two(h)}
    first, second = jt.triton_call(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        kernel=_attend_span,
        out_type=(mixed, sums) if split else (q, jax.ShapeDtypeStruct((1,), jnp.float32)),
        grid=(choice.splits, num_kv_heads, b),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        SCALE=scale * math.log2(math.e),
        WINDOW=window or 0,
        TABLE_WIDTH=page_table.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUP_TILE=max(SMALLEST_TILE, power_of_two(group)),
        PAGE_SIZE=page_size,
        SPLITS=choice.splits,
        BLOCK=choice.block,
        **sizes,
    )
    if not split:
        return first
    return jt.triton_call(
        first,
        second,
        kernel=_combine_spans,
        out_type=q,
        grid=(b * n,),
        num_warps=launch.COMBINE_WARPS,
        num_stages=1,
        SPLITS=choice.splits,
        SPLITS_TILE=power_of_two(choice.splits),
        **sizes,
    )
