"""append_decode in Triton: one launch for norm, rope, append, attention and the merge of splits.

A CTA reads one split of a row's keys for one kv head, with all queries of that head in one tile
(padded to 16, the smallest tile of the tensor cores), so each key and value is read once. Each CTA
rotates the queries. The CTA of the last split that has keys also rotates the new key and uses it
and the new value from its registers, so no CTA waits until they are in memory. With few rows a
context has several splits (Flash-Decoding: Dao et al., 2023); the last CTA of a row and head to
arrive merges the states of all, always in the same order. Softmax is computed in base 2, sums in
float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.append_decode import launch
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.lib.attention_triton import LOG2_E, capped
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.page_scales import pools_of
from pallas_kernels.lib.page_scales_triton import (
    exponents_of,
    pairs_of,
    rounded,
    scales_of,
)
from pallas_kernels.lib.splits_triton import arrives_last, merged, store_state

MIN_TILE = 16  # of tl.dot, in every dimension


@triton.jit
def _norm_and_rotate(
    heads,  # start of a head, or [G, 1] pointers
    dims,  # int32[H tile], or [1, H tile] for several heads
    inside,  # mask of heads and dims
    cos,  # float32[B, H / 2], at the row
    sin,
    norm,  # [H]; unused without HAS_NORMS
    axis: tl.constexpr,  # of dims
    EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROTATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Heads normalised and rotated, in their dtype."""
    x = tl.load(heads + dims, mask=inside, other=0.0)
    if ROTATE:
        HALF: tl.constexpr = HEAD_DIM // 2
        in_dim = dims < HEAD_DIM
        other = tl.where(dims < HALF, dims + HALF, dims - HALF)
        y = tl.load(heads + other, mask=inside, other=0.0)
        x32 = x.to(tl.float32)
        y32 = y.to(tl.float32)
        if HAS_NORMS:
            scale = tl.rsqrt(tl.sum(x32 * x32, axis, keep_dims=True) / HEAD_DIM + EPS)
            x_weight = tl.load(norm + dims, mask=in_dim, other=0.0).to(tl.float32)
            y_weight = tl.load(norm + other, mask=in_dim, other=0.0).to(tl.float32)
            x32 = (x32 * scale * x_weight).to(x.dtype).to(tl.float32)
            y32 = (y32 * scale * y_weight).to(x.dtype).to(tl.float32)
        angle = tl.where(dims < HALF, dims, dims - HALF)
        c = tl.load(cos + angle, mask=in_dim, other=0.0)
        s = tl.load(sin + angle, mask=in_dim, other=0.0)
        x = (x32 * c + y32 * tl.where(dims < HALF, -s, s)).to(x.dtype)
    return x


@triton.jit
def _merge_splits(
    accs,  # float32[B, K, SPLITS, G, H]
    m_l,  # float32[B, K, SPLITS, 2, G]: m_i, l_i
    out,  # [G, H] of the row and kv head
    first_split,
    used,  # splits that have keys
    dims,  # int32[H tile]
    is_row,  # False for padding
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one row and kv head."""
    # ".cg" bypasses L1, which is not coherent with the writes of other SMs
    splits = first_split + tl.arange(0, SPLITS)
    is_used = tl.arange(0, SPLITS) < used
    in_dim = dims < HEAD_DIM
    readable = is_used[:, None] & in_dim[None, :]
    # unrolled, so that all loads are in flight at the same time
    for head in tl.static_range(GROUP):  # type: ignore[attr-defined]
        at_m = m_l + splits * 2 * GROUP + head
        m_i = tl.load(at_m, mask=is_used, other=float("-inf"), cache_modifier=".cg")
        l_i = tl.load(at_m + GROUP, mask=is_used, other=0.0, cache_modifier=".cg")
        alpha = tl.exp2(m_i - tl.max(m_i, 0))
        at_acc = accs + (splits * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
        acc = tl.load(at_acc, mask=readable, other=0.0, cache_modifier=".cg")
        result = tl.sum(acc * alpha[:, None], 0) / tl.sum(l_i * alpha, 0)
        result = tl.where(is_row, result, 0.0)
        tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=in_dim)


@triton.jit
def _merge_tile(
    accs,  # float32[SPLITS, G, H] of the row and kv head
    m_l,  # float32[SPLITS, 2, G]: m_i, l_i
    out,  # [G, H]
    used,  # splits that have keys
    dims,  # int32[H tile]
    is_row,  # False for padding
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    """``_merge_splits`` for wide heads: one split after the other, all queries in a tile."""
    heads = tl.arange(0, MERGE_TILE)
    in_heads = heads < GROUP
    inside = in_heads[:, None] & (dims < HEAD_DIM)[None, :]
    result = merged(accs, m_l, used, heads, dims, in_heads, inside, GROUP, HEAD_DIM, SPLITS, SPLITS)
    result = tl.where(is_row, result, 0.0)
    to = heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_scaled(
    query,  # [GROUP_TILE, DIM_TILE]
    m_i,  # float32[GROUP_TILE]: largest score plus exponent of its value's scale so far
    l_i,  # float32[GROUP_TILE]: sum of exp2(score - m_i)
    acc,  # float32[GROUP_TILE, DIM_TILE]
    k_pages,  # uint8[P, S, K, H], of one kv head
    v_pages,  # uint8[P, S, K, H], of one kv head
    k_scales,  # float32[P, S, K], of one kv head
    v_scales,  # float32[P, S, K], of one kv head
    page_ids,  # int32[M] of the row
    start,
    end,
    SCALE: tl.constexpr,  # of scores, times log2(e)
    CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys from ``start`` to ``end`` in pages of 8-bit floats.

    Scores are relative to the largest score plus exponent of the value's scale, 2^e <= scale. So a
    weight times its value's scale is less than 2, and 16 bits hold it whatever the values are.

    Components are read two at a time, as 16-bit numbers, and even and odd ones are multiplied
    separately. Shared memory gives the tensor cores' fragments of 16-bit numbers, also transposed,
    in one instruction; of single bytes a warp made 64 loads for 64 values.

    Loads have no masks: keys after the last are the last one again, with a score of -inf.
    """
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    HALF: tl.constexpr = DIM_TILE // 2
    keys = tl.arange(0, BLOCK)
    pairs = tl.arange(0, HALF)
    query_even, query_odd = tl.split(tl.reshape(query, (GROUP_TILE, HALF, 2)))
    even, odd = tl.split(tl.reshape(acc, (GROUP_TILE, HALF, 2)))
    sums = tl.zeros((GROUP_TILE, BLOCK), tl.float32)  # of weights, for each position in a block
    k_pairs = k_pages.to(tl.pointer_type(tl.int16), bitcast=True)
    v_pairs = v_pages.to(tl.pointer_type(tl.int16), bitcast=True)
    for first in range(start, end, BLOCK):
        position = tl.minimum(first + keys, end - 1).to(tl.uint32)  # simpler to divide
        page = tl.load(page_ids + position // PAGE_SIZE)
        slot = page.to(tl.uint32) * PAGE_SIZE + position % PAGE_SIZE
        slot = slot.to(tl.int64)  # offsets exceed int32
        at_pairs = (slot * (SLOT_STRIDE // 2))[:, None] + pairs[None, :]
        if HEAD_DIM < DIM_TILE:
            k = tl.load(k_pairs + at_pairs, mask=(pairs < HEAD_DIM // 2)[None, :], other=0)
            v = tl.load(v_pairs + at_pairs, mask=(pairs < HEAD_DIM // 2)[None, :], other=0)
        else:
            k = tl.load(k_pairs + at_pairs)
            v = tl.load(v_pairs + at_pairs)
        key_scales = tl.load(k_scales + slot * NUM_KV_HEADS)
        value_scales = tl.load(v_scales + slot * NUM_KV_HEADS)
        k_even, k_odd = pairs_of(k, query.dtype)
        scores = tl.dot(query_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(query_odd, tl.trans(k_odd), scores, input_precision="ieee")
        scores *= (key_scales * SCALE)[None, :]
        if CAP > 0:
            scores = capped(scores, CAP)
        # The first key of a block is always visible, so m_ij is never -inf.
        scores = tl.where((first + keys < end)[None, :], scores, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(scores + exponents_of(value_scales)[None, :], 1))
        alpha = tl.exp2(m_i - m_ij)
        p = tl.exp2(scores - m_ij[:, None])
        weights = (p * value_scales[None, :]).to(query.dtype)
        v_even, v_odd = pairs_of(v, query.dtype)
        even = tl.dot(weights, v_even, even * alpha[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * alpha[:, None], input_precision="ieee")
        sums = sums * alpha[:, None] + p
        l_i *= alpha
        m_i = m_ij
    return m_i, l_i + tl.sum(sums, 1), tl.reshape(tl.join(even, odd), (GROUP_TILE, DIM_TILE))


@triton.jit
def _attend_pages(
    query,  # [GROUP_TILE, DIM_TILE]
    m_i,  # float32[GROUP_TILE]: largest score so far
    l_i,  # float32[GROUP_TILE]: sum of exp2(score - m_i)
    acc,  # float32[GROUP_TILE, DIM_TILE]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_ids,  # int32[M] of the row
    kv_head,
    dims,  # int32[DIM_TILE]
    keys,  # int32[BLOCK]
    start,
    end,
    SCALE: tl.constexpr,  # of scores, times log2(e)
    CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys from ``start`` to ``end`` in pages of the model's dtype."""
    in_dim = dims < HEAD_DIM
    for first in range(start, end, BLOCK):
        position = first + keys
        visible = position < end
        page = tl.load(page_ids + position // PAGE_SIZE, mask=visible, other=0)
        slot = (page * PAGE_SIZE + position % PAGE_SIZE).to(tl.int64)  # offsets exceed int32
        at_key = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        readable = visible[:, None] & in_dim[None, :]
        k = tl.load(k_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * SCALE
        if CAP > 0:
            scores = capped(scores, CAP)
        # The first key of a block is always visible, so m_ij is never -inf.
        scores = tl.where(visible[None, :], scores, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(scores, 1))
        alpha = tl.exp2(m_i - m_ij)
        p = tl.exp2(scores - m_ij[:, None])
        v = tl.load(v_pages + at_key, mask=readable, other=0.0).to(query.dtype)
        pv = tl.dot(p.to(query.dtype), v, input_precision="ieee")
        acc = acc * alpha[:, None] + pv
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_ij
    return m_i, l_i, acc


@triton.jit
def _split_keys(
    last,  # position of the row's new token
    length,  # with it; 0 for padding, which is computed as a row of one token
    WINDOW: tl.constexpr,
    APPENDS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """The oldest key in pages, the one after the last, keys a split, and splits that have keys."""
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(last + 1 - WINDOW, 0)
    written = last if APPENDS else length  # keys in the pages
    keys_of_row = written - oldest
    per_split = tl.cdiv(keys_of_row, SPLITS)
    if MIN_KEYS > 0:
        fewer = tl.minimum(tl.cdiv(keys_of_row, MIN_KEYS), SPLITS)
        per_split = tl.cdiv(keys_of_row, tl.maximum(fewer, 1))
    per_split = tl.cdiv(per_split, BLOCK) * BLOCK
    used = tl.cdiv(keys_of_row, tl.maximum(per_split, 1))
    return oldest, written, per_split, tl.maximum(used, 1)


@triton.jit
def _new_value(
    at_value,  # [H] of the new token's kv head
    dims,  # int32[DIM_TILE]
    in_dim,
    NORM_VALUES: tl.constexpr,
    EPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The new token's value, with its norm if it has one."""
    value = tl.load(at_value + dims, mask=in_dim, other=0.0)
    if NORM_VALUES:
        value32 = value.to(tl.float32)
        norm = tl.rsqrt(tl.sum(value32 * value32, 0) / HEAD_DIM + EPS)
        value = (value32 * norm).to(value.dtype)
    return value


@triton.jit
def _append(
    key,  # [DIM_TILE]
    value,  # [DIM_TILE]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    at_scale,  # the slot and kv head
    dims,  # int32[DIM_TILE]
    stored,  # mask of dims; False for padding
    is_row,
    SCALED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store the new key and value; both as the pages have them, and their scales."""
    at_slot = at_scale * HEAD_DIM + dims
    key_scale, value_scale = 1.0, 1.0
    if SCALED:
        key_scale, value_scale = scales_of(key, 0), scales_of(value, 0)
        key, value = rounded(key, key_scale), rounded(value, value_scale)
        tl.store(k_scales + at_scale, key_scale, mask=is_row)
        tl.store(v_scales + at_scale, value_scale, mask=is_row)
        tl.store(k_pages + at_slot, key.to(tl.uint8, bitcast=True), mask=stored)
        tl.store(v_pages + at_slot, value.to(tl.uint8, bitcast=True), mask=stored)
    else:
        key = key.to(k_pages.dtype.element_ty)
        value = value.to(v_pages.dtype.element_ty)
        tl.store(k_pages + at_slot, key, mask=stored)
        tl.store(v_pages + at_slot, value, mask=stored)
    return key, value, key_scale, value_scale


@triton.jit
def _attend_new_key(
    query,  # [GROUP_TILE, DIM_TILE]
    key,  # [DIM_TILE], as the pages have it
    value,  # [DIM_TILE], as the pages have it
    key_scale,
    value_scale,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """The state m_i, l_i, acc after the new key alone."""
    m_i = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * SCALE
    if SCALED:
        m_i = m_i * key_scale
    if CAP > 0:
        m_i = capped(m_i, CAP)
    l_i = tl.full((GROUP_TILE,), 1.0, tl.float32)
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    if SCALED:  # see _attend_scaled
        exponent = exponents_of(value_scale)
        m_i += exponent
        l_i *= tl.exp2(-exponent)
        acc += value.to(tl.float32)[None, :] * (value_scale * tl.exp2(-exponent))
    else:
        acc += value.to(tl.float32)[None, :]
    return m_i, l_i, acc


@triton.jit
def _append_and_attend(
    qkv,  # [B, N + 2K, H]
    cos,  # float32[B, H / 2]
    sin,  # float32[B, H / 2]
    qk_norms,  # [2, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[B, M]
    seq_lens,  # int32[B]
    arrivals,  # int32[>= B * K], zeros before and after; unused with one split
    sinks,  # [N]; unused without HAS_SINKS
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    out,  # [B, N, H]
    accs,  # float32[B, K, SPLITS, G, H]; unused with one split
    m_l,  # float32[B, K, SPLITS, 2, G]: m_i, l_i; unused with one split
    SCALE: tl.constexpr,  # of scores, times log2(e)
    CAP: tl.constexpr,  # of scores, times log2(e); 0: no cap
    EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,  # pages are the bits of 8-bit floats, with scales
    ROTATE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    TABLE_WIDTH: tl.constexpr,
    APPENDS: tl.constexpr,
    NORM_VALUES: tl.constexpr,  # values have a norm without weights
    NEW: tl.constexpr,  # heads of a new token for each kv head; 1: the value is made of the key
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # keys per loop iteration
    MIN_KEYS: tl.constexpr,  # of a split, but for the last one
    MERGE_TILE: tl.constexpr,  # rows of ``_merge_tile``; 0: ``_merge_splits`` merges
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    keys = tl.arange(0, BLOCK)
    in_dim = dims < HEAD_DIM
    in_group = (heads < GROUP)[:, None] & in_dim[None, :]
    at_out = (row * NUM_HEADS + kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]

    length = tl.load(seq_lens + row)
    is_row = length > 0  # padding yields zeros
    last = tl.maximum(length - 1, 0)
    oldest, written, per_split, used = _split_keys(  # type: ignore[misc]
        last, length, WINDOW, APPENDS, SPLITS, BLOCK, MIN_KEYS
    )
    if split >= used:
        return
    start = oldest + split * per_split
    end = tl.minimum(start + per_split, written)

    at_row = qkv + row.to(tl.int64) * (NUM_HEADS + NEW * NUM_KV_HEADS) * HEAD_DIM
    cos += row * (HEAD_DIM // 2)
    sin += row * (HEAD_DIM // 2)
    at_heads = at_row + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    query = _norm_and_rotate(
        at_heads, dims[None, :], in_group, cos, sin, qk_norms, 1, EPS, HAS_NORMS, ROTATE, HEAD_DIM
    )
    if SCALED and qkv.dtype.element_ty == tl.bfloat16:
        query = query.to(tl.float16)  # see paged_prefill

    m_i = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    l_i = tl.zeros((GROUP_TILE,), tl.float32)
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    if not APPENDS and HAS_SINKS and split == used - 1:
        at_sink = sinks + kv_head * GROUP + heads
        m_i = tl.load(at_sink, mask=heads < GROUP, other=0.0).to(tl.float32) * LOG2_E
        l_i = tl.full((GROUP_TILE,), 1.0, tl.float32)
    if APPENDS and split == used - 1:  # splits are whole blocks, so the last has the fewest keys
        at_key = at_row + (NUM_HEADS + kv_head) * HEAD_DIM
        key = _norm_and_rotate(
            at_key, dims, in_dim, cos, sin, qk_norms + HEAD_DIM, 0, EPS, HAS_NORMS, ROTATE, HEAD_DIM
        )
        at_value = at_row + (NUM_HEADS + (NEW - 1) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        value = _new_value(at_value, dims, in_dim, NORM_VALUES, EPS, HEAD_DIM)
        page = tl.load(page_table + row * TABLE_WIDTH + last // PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + last % PAGE_SIZE
        key, value, key_scale, value_scale = _append(
            key, value, k_pages, v_pages, k_scales, v_scales, slot * NUM_KV_HEADS + kv_head, dims,
            in_dim & is_row, is_row, SCALED, HEAD_DIM,
        )  # fmt: skip
        m_i, l_i, acc = _attend_new_key(
            query, key, value, key_scale, value_scale, SCALE, CAP, SCALED, GROUP_TILE, DIM_TILE
        )
        if HAS_SINKS:
            at_sink = sinks + kv_head * GROUP + heads
            sink = tl.load(at_sink, mask=heads < GROUP, other=0.0).to(tl.float32) * LOG2_E
            m_ij = tl.maximum(m_i, sink)
            alpha = tl.exp2(m_i - m_ij)
            acc = acc * alpha[:, None]
            l_i = l_i * alpha + tl.exp2(sink - m_ij)
            m_i = m_ij

    if SCALED:
        m_i, l_i, acc = _attend_scaled(
            query, m_i, l_i, acc, k_pages + kv_head * HEAD_DIM, v_pages + kv_head * HEAD_DIM,
            k_scales + kv_head, v_scales + kv_head, page_table + row * TABLE_WIDTH, start, end,
            SCALE, CAP, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, PAGE_SIZE, GROUP_TILE, BLOCK,
        )  # fmt: skip
    else:
        m_i, l_i, acc = _attend_pages(
            query, m_i, l_i, acc, k_pages, v_pages, page_table + row * TABLE_WIDTH, kv_head, dims,
            keys, start, end, SCALE, CAP, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK,
        )  # fmt: skip

    if SPLITS == 1:
        result = tl.where(is_row, acc / l_i[:, None], 0.0)
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=in_group)
        return
    row_head = row * NUM_KV_HEADS + kv_head
    first_split = (row_head * SPLITS).to(tl.int64)
    own_accs = accs + first_split * (GROUP * HEAD_DIM)
    own_m_l = m_l + first_split * 2 * GROUP
    store_state(
        own_accs, own_m_l, split, heads, dims, heads < GROUP, in_group, m_i, l_i, acc, GROUP,
        HEAD_DIM,
    )  # fmt: skip
    if not arrives_last(arrivals + row_head, used):
        return
    at_heads = out + row_head * (GROUP * HEAD_DIM)
    if MERGE_TILE > 0:
        _merge_tile(
            own_accs, own_m_l, at_heads, used, dims, is_row, GROUP, HEAD_DIM, SPLITS, MERGE_TILE
        )
    else:
        _merge_splits(accs, m_l, at_heads, first_split, used, dims, is_row, GROUP, HEAD_DIM, SPLITS)


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: DecodeArgs
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """``append_decode`` with a given configuration; the tuner calls it too."""
    (b, n, h), (page_size, num_kv_heads) = args.queries.shape, args.k_pages.shape[1:3]
    is_scaled = args.k_scales is not None
    group, splits, arrivals = n // num_kv_heads, config.splits, args.arrivals
    if arrivals is None:
        arrivals = jax.new_ref(jnp.zeros(b * num_kv_heads if splits > 1 else 1, jnp.int32))
    unused = args.seq_lens  # placeholder for an array that the kernel does not read
    partials = (b, num_kv_heads, splits) if splits > 1 else (1, 1, 1)
    pools: Any = pools_of(args)
    if args.appends:  # jax-triton updates a Ref in place
        pools = tuple(map(jax.new_ref, pools))
    out, _, _ = jt.triton_call(
        args.qkv,
        unused if args.cos is None else args.cos,
        unused if args.sin is None else args.sin,
        unused if args.qk_norms is None else args.qk_norms,
        *pools[:2],
        args.page_table,
        args.seq_lens,
        arrivals,
        unused if args.sinks is None else args.sinks,
        *(pools[2:] or (unused, unused)),
        kernel=_append_and_attend,
        out_type=(
            jax.ShapeDtypeStruct((b, n, h), args.qkv.dtype),
            jax.ShapeDtypeStruct((*partials, group, h) if splits > 1 else partials, jnp.float32),
            jax.ShapeDtypeStruct((*partials, 2, group) if splits > 1 else partials, jnp.float32),
        ),
        grid=(splits, num_kv_heads, b),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=args.scale * LOG2_E.value,
        CAP=(args.cap or 0.0) * LOG2_E.value,
        EPS=args.eps,
        HAS_NORMS=args.qk_norms is not None,
        HAS_SINKS=args.sinks is not None,
        SCALED=is_scaled,
        ROTATE=args.cos is not None,
        WINDOW=args.window or 0,
        TABLE_WIDTH=args.page_table.shape[1],
        APPENDS=args.appends,
        NORM_VALUES=args.values != "projected",
        NEW=args.new_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_TILE=max(MIN_TILE, power_of_two(group)),
        HEAD_DIM=h,
        DIM_TILE=max(power_of_two(h), (1 + is_scaled) * MIN_TILE),  # of pairs of 8-bit floats
        PAGE_SIZE=page_size,
        SPLITS=splits,
        BLOCK=config.block,
        MIN_KEYS=config.min_keys,
        MERGE_TILE=power_of_two(group) if h > launch.WIDE_HEAD else 0,
    )
    if not args.appends:
        return out, *pools
    return out, *map(jax.freeze, pools)
