"""Attention in Triton whose bits for a token depend only on the tokens before it.

Decode rows and prompts have one kernel with one tile, in which a decode row is one token. Keys are
divided into splits of one size and these into blocks, both counted from the first key of the
sequence, so a token's sums have the same order wherever its chunk begins. A CTA of a prompt's
tokens walks their splits and merges each into the state of those before it; of decode rows each
split has a CTA, and a second launch merges them, by the same function in the same order. A split or
a block in which a query sees no key leaves its state as it is, bit by bit.

Softmax is computed in base 2, sums in float32. The merge is written with ``fma``, since a compiler
that chose one itself might do so in one kernel alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.attention_triton import (
    capped,
    finite,
    first_state,
    is_visible,
    result_of,
    slots_of,
    with_state,
)
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.paged_prefill.fixed import launch as fixed_launch
from pallas_kernels.paged_prefill.launch import STARTS_TILE, sizes_of
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.paged_prefill.tile import (
    context_of,
    load_queries,
    oldest_key,
    store_result,
)


@triton.jit
def _attend_split(
    query,  # [ROWS, DIM_TILE]
    last_key,  # int32[ROWS]: position of the last visible key of each query
    k_pages,  # [P, S, K, H], of one kv head
    v_pages,  # [P, S, K, H], of one kv head
    page_ids,  # int32[M] of the row
    start,  # of the split
    oldest,  # the first key that a query of the tile sees
    end,  # of the split, or of the keys that a query of the tile sees
    SCALE: tl.constexpr,  # of scores, times log2(e)
    CAP: tl.constexpr,  # of scores before they are scaled; 0: no cap
    WINDOW: tl.constexpr,  # 0: no window
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state of a tile's queries over the keys of one split."""
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_TILE), tl.float32)
    keys = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_TILE)
    for first in range(tl.maximum(start, oldest // BLOCK * BLOCK), end, BLOCK):
        position = first + keys
        # pages before a window may have another owner, and unwritten slots may hold NaN
        written = (position >= oldest) & (position < end)
        slot = slots_of(page_ids, position, written, PAGE_SIZE, True)
        at = (slot * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
        readable = written[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_pages + at, mask=readable, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if CAP > 0:
            scores = capped(scores, CAP)
        scores = tl.where(is_visible(position, last_key, WINDOW), scores * SCALE, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(scores, 1))
        base = finite(m_ij)
        alpha = tl.exp2(m_i - base)
        p = tl.exp2(scores - base[:, None])
        l_i = tl.fma(l_i, alpha, tl.sum(p, 1))
        v = tl.load(v_pages + at, mask=readable, other=0.0)
        acc = tl.dot(p.to(query.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij
    return m_i, l_i, acc


@triton.jit
def _attend(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]; unused of decode rows
    sinks,  # [N]; unused without HAS_SINKS, and of decode rows
    out,  # [T, N, H]; of decode rows float32[T, SPLITS, N, H]: sums of values
    m_l,  # float32[T, SPLITS, 2, N]: m_i, l_i; unused of prompts
    num_tokens,  # T; this and the next two are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1 instead of R, since jax-triton specialises on the integer 1
    table_width,  # M
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STARTS_TILE: tl.constexpr,  # at least R + 1
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # (token, query head) pairs of the tile
    TOKENS: tl.constexpr,  # tokens of the tile
    BLOCK: tl.constexpr,  # keys per loop iteration
    SPLIT: tl.constexpr,
    DECODES: tl.constexpr,  # each row has one token, and each of its splits a CTA
):
    kv_head = tl.program_id(0)
    pair = tl.arange(0, ROWS)
    token = pair // GROUP
    if DECODES:
        row = tl.program_id(1)
        length = tl.load(seq_lens + row)
        first_token = row
        count = tl.minimum(length, 1)
        position = length - 1
    else:
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        row, _, row_end, first_token = row_of_tile(  # type: ignore[misc]
            tile, query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
        )
        if first_token >= row_end:
            return
        length = tl.load(seq_lens + row, mask=row + 1 < num_starts, other=0)  # 0: padding
        count, position = context_of(first_token, row_end, length, TOKENS)
    end = position + count
    oldest = oldest_key(position, WINDOW)
    dims = tl.arange(0, DIM_TILE)
    in_count = token < count
    head = kv_head * GROUP + pair % GROUP
    in_tile = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    at_tile = first_token.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    last_key = position + token
    k_head = k_pages + kv_head * HEAD_DIM
    v_head = v_pages + kv_head * HEAD_DIM
    page_ids = page_table + row * table_width
    if DECODES:
        split = tl.program_id(2)
        start = split * SPLIT
        if (start >= end) | (start + SPLIT <= oldest):
            return
        query = load_queries(q + at_tile, in_tile, in_count, HEAD_DIM, DIM_TILE, False)
        m_i, l_i, acc = _attend_split(  # type: ignore[misc]
            query, last_key, k_head, v_head, page_ids, start, oldest,
            tl.minimum(start + SPLIT, end),
            SCALE, CAP, WINDOW, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, PAGE_SIZE, ROWS, BLOCK,
        )  # fmt: skip
        at_split = (row * tl.num_programs(2) + split).to(tl.int64)
        at_acc = at_split * (NUM_KV_HEADS * GROUP * HEAD_DIM)
        inside = in_count[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out + at_acc + (in_tile[:, None] + dims[None, :]), acc, mask=inside)
        at_m = m_l + at_split * (2 * NUM_KV_HEADS * GROUP) + head
        tl.store(at_m, m_i, mask=in_count)
        tl.store(at_m + NUM_KV_HEADS * GROUP, l_i, mask=in_count)
    else:
        query = load_queries(q + at_tile, in_tile, in_count, HEAD_DIM, DIM_TILE, False)
        m_i, l_i = first_state(sinks, head, HAS_SINKS, ROWS)  # type: ignore[misc]
        acc = tl.zeros((ROWS, DIM_TILE), tl.float32)
        for start in range(oldest // SPLIT * SPLIT, end, SPLIT):
            m_ij, l_ij, acc_ij = _attend_split(  # type: ignore[misc]
                query, last_key, k_head, v_head, page_ids, start, oldest,
                tl.minimum(start + SPLIT, end),
                SCALE, CAP, WINDOW, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, PAGE_SIZE, ROWS, BLOCK,
            )  # fmt: skip
            m_i, l_i, acc = with_state(m_i, l_i, acc, m_ij, l_ij, acc_ij)  # type: ignore[misc]
        store_result(out + at_tile, in_tile, dims, in_count, l_i, acc, HEAD_DIM)


@triton.jit
def _merge(
    accs,  # float32[T, SPLITS, N, H]
    m_l,  # float32[T, SPLITS, 2, N]
    seq_lens,  # int32[T]
    sinks,  # [N]; unused without HAS_SINKS
    out,  # [T, N, H]
    num_splits,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA
):
    """The output of some heads of a decode row."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    dims = tl.arange(0, DIM_TILE)
    inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    in_row = head[:, None] * HEAD_DIM + dims[None, :]
    length = tl.load(seq_lens + row)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    safe = tl.where(is_head, head, 0)
    m_i, l_i = first_state(sinks, safe, HAS_SINKS, HEADS)  # type: ignore[misc]
    acc = tl.zeros((HEADS, DIM_TILE), tl.float32)
    for split in range(oldest // SPLIT, tl.cdiv(length, SPLIT)):
        at_split = row.to(tl.int64) * num_splits + split
        at_m = m_l + at_split * (2 * NUM_HEADS) + head
        m_ij = tl.load(at_m, mask=is_head, other=float("-inf"))
        l_ij = tl.load(at_m + NUM_HEADS, mask=is_head, other=0.0)
        at_acc = at_split * (NUM_HEADS * HEAD_DIM)
        acc_ij = tl.load(accs + at_acc + in_row, mask=inside, other=0.0)
        m_i, l_i, acc = with_state(m_i, l_i, acc, m_ij, l_ij, acc_ij)  # type: ignore[misc]
    result = tl.where(length > 0, result_of(l_i, acc), 0.0)
    at_out = row.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    tl.store(out + at_out + in_row, result.to(out.dtype.element_ty), mask=inside)


def _sizes(q: jax.Array, args: Any) -> dict[str, Any]:
    """The parameters that both launches have."""
    tiles = fixed_launch.tiles_for(q.dtype.itemsize, q.shape[2])
    split = fixed_launch.split_for(args.page_table.shape[1], args.k_pages.shape[1])
    return sizes_of(q, args, tiles) | {"SPLIT": split}


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    t, num_starts, sizes = len(args.q), len(args.query_start_loc), _sizes(args.q, args)
    out, _ = jt.triton_call(
        args.q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.seq_lens,
        args.query_start_loc,
        args.seq_lens if args.sinks is None else args.sinks,
        kernel=_attend,
        out_type=(
            jax.ShapeDtypeStruct(args.q.shape, args.q.dtype),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ),
        grid=(sizes["NUM_KV_HEADS"], t // sizes["TOKENS"] + num_starts),
        num_tokens=t,
        num_starts=num_starts,
        STARTS_TILE=max(STARTS_TILE, power_of_two(num_starts)),
        DECODES=False,
        **sizes,
    )
    return out


def attend_rows(
    q: jax.Array,  # [B, N, H]
    args: Any,  # the pages, the context and the settings of a ``DecodeArgs``
) -> jax.Array:  # [B, N, H]
    """Attention of one token of each row, whose keys and values are in the pages."""
    (b, n, h), sizes = q.shape, _sizes(q, args)
    splits = -(-sizes["table_width"] * sizes["PAGE_SIZE"] // sizes["SPLIT"])
    sinks = args.seq_lens if args.sinks is None else args.sinks
    accs, m_l = jt.triton_call(
        q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.seq_lens,
        args.seq_lens,
        sinks,
        kernel=_attend,
        out_type=(
            jax.ShapeDtypeStruct((b, splits, n, h), jnp.float32),
            jax.ShapeDtypeStruct((b, splits, 2, n), jnp.float32),
        ),
        grid=(sizes["NUM_KV_HEADS"], b, splits),
        num_tokens=b,
        num_starts=b + 1,
        STARTS_TILE=STARTS_TILE,
        DECODES=True,
        **sizes,
    )
    heads = min(power_of_two(n), 16)
    return jt.triton_call(
        accs,
        m_l,
        args.seq_lens,
        sinks,
        kernel=_merge,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(b, -(-n // heads)),
        num_warps=4,
        num_stages=1,
        num_splits=splits,
        NUM_HEADS=n,
        HEADS=heads,
        **{x: sizes[x] for x in ("WINDOW", "HAS_SINKS", "HEAD_DIM", "DIM_TILE", "SPLIT")},
    )
