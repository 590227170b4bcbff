"""append_decode in Triton: one launch for norm, rope, append, attention and its combination.

One program reads one span of one row's keys for one kv head, with all of that head's queries in
one tile (padded to 16, the smallest tile of the matrix units), so each key and value is read once.
It turns the queries itself. The last span also turns the new key and takes it and the new value
from its registers, so that nobody has to wait for them to reach memory. With few rows a context is
cut into several spans (flash-decoding: Dao et al., 2023); of the programs that share a row and a
head, the last to arrive combines what all of them found, always in the same order. Softmax runs in
base 2, sums in float32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.append_decode import launch
from pallas_kernels.numerics import power_of_two

SMALLEST_TILE = 16  # of tl.dot, in every direction


@triton.jit
def _turned(
    heads,  # where the heads begin, one pointer or [G, 1] of them
    dims,  # int32[H tile], or [1, H tile] beside pointers of several heads
    inside,  # mask of heads and dims
    cos,  # float32[B, H / 2], at the row
    sin,
    norm,  # [H]; anything without HAS_NORMS
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
def _combine(
    mixed,  # float32[B, K, SPLITS, G, H]
    sums,  # float32[B, K, SPLITS, 2, G]
    out,  # [G, H], the row's and head's part
    first_span,
    dims,  # int32[H tile]
    is_row,  # or padding
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Attention of one row and kv head from all its spans."""
    # ".cg": past the first-level cache, which other multiprocessors do not write to
    spans = first_span + tl.arange(0, SPLITS)
    in_dim = dims < HEAD_DIM
    # unrolled: all loads are under way at once
    for head in tl.static_range(GROUP):  # type: ignore[attr-defined]
        top = tl.load(sums + spans * 2 * GROUP + head, cache_modifier=".cg")
        total = tl.load(sums + spans * 2 * GROUP + GROUP + head, cache_modifier=".cg")
        weights = tl.exp2(top - tl.max(top, 0))
        at_parts = mixed + (spans * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(at_parts, mask=in_dim[None, :], other=0.0, cache_modifier=".cg")
        result = tl.sum(parts * weights[:, None], 0) / tl.sum(total * weights, 0)
        result = tl.where(is_row, result, 0.0)
        tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=in_dim)


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
    arrivals,  # int32[>= B * K], zeros before and after; anything with one span
    out,  # [B, N, H]
    mixed,  # float32[B, K, SPLITS, G, H]; unused with one span, and so are the sums
    sums,  # float32[B, K, SPLITS, 2, G]: largest score, sum of weights
    SCALE: tl.constexpr,  # of scores, log2(e) included
    EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROTATE: tl.constexpr,
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
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    keys = tl.arange(0, BLOCK)
    in_dim = dims < HEAD_DIM
    in_group = (heads < GROUP)[:, None] & in_dim[None, :]
    at_out = (row * NUM_HEADS + kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]

    length = tl.load(seq_lens + row)
    is_row = length > 0  # or padding, which takes part as a row of one token and yields zeros
    last = tl.maximum(length - 1, 0)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(last + 1 - WINDOW, 0)
    per_split = tl.cdiv(tl.cdiv(last - oldest, SPLITS), BLOCK) * BLOCK
    start = oldest + split * per_split
    end = tl.minimum(start + per_split, last)

    at_row = qkv + row.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    cos += row * (HEAD_DIM // 2)
    sin += row * (HEAD_DIM // 2)
    at_heads = at_row + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    query = _turned(
        at_heads, dims[None, :], in_group, cos, sin, qk_norms, 1, EPS, HAS_NORMS, ROTATE, HEAD_DIM
    )
    if k_pages.dtype.element_ty.primitive_bitwidth == 8 and qkv.dtype.element_ty == tl.bfloat16:
        query = query.to(tl.float16)  # as in paged_prefill

    top = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    if split == SPLITS - 1:  # spans are whole blocks, so the last has the fewest keys
        at_key = at_row + (NUM_HEADS + kv_head) * HEAD_DIM
        key = _turned(
            at_key, dims, in_dim, cos, sin, qk_norms + HEAD_DIM, 0, EPS, HAS_NORMS, ROTATE, HEAD_DIM
        ).to(k_pages.dtype.element_ty)
        at_value = at_row + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM
        value = tl.load(at_value + dims, mask=in_dim, other=0.0).to(v_pages.dtype.element_ty)
        page = tl.load(page_table + row * TABLE_WIDTH + last // PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + last % PAGE_SIZE
        at_slot = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims
        tl.store(k_pages + at_slot, key, mask=in_dim & is_row)
        tl.store(v_pages + at_slot, value, mask=in_dim & is_row)
        top = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * SCALE
        total = tl.full((GROUP_TILE,), 1.0, tl.float32)
        acc += value.to(tl.float32)[None, :]

    for first in range(start, end, BLOCK):
        position = first + keys
        seen = position < end
        page = tl.load(page_table + row * TABLE_WIDTH + position // PAGE_SIZE, mask=seen, other=0)
        slot = (page * PAGE_SIZE + position % PAGE_SIZE).to(tl.int64)  # bytes pass 2**31
        at_key = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        readable = seen[:, None] & in_dim[None, :]
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
        result = tl.where(is_row, acc / total[:, None], 0.0)
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=in_group)
        return
    row_head = row * NUM_KV_HEADS + kv_head
    first_span = (row_head * SPLITS).to(tl.int64)
    SPAN: tl.constexpr = GROUP * HEAD_DIM
    at_sum = sums + (first_span + split) * 2 * GROUP + heads
    tl.store(at_sum, top, mask=heads < GROUP)
    tl.store(at_sum + GROUP, total, mask=heads < GROUP)
    at_mixed = mixed + (first_span + split) * SPAN
    tl.store(at_mixed + heads[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_group)
    tl.debug_barrier()  # every thread's stores come before the arrival, which releases them
    if tl.atomic_add(arrivals + row_head, 1, sem="acq_rel") < SPLITS - 1:
        return
    tl.store(arrivals + row_head, 0)
    at_heads = out + row_head * SPAN
    _combine(mixed, sums, at_heads, first_span, dims, is_row, GROUP, HEAD_DIM, SPLITS)


def append_decode(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,  # int32[>= B * K]
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    static = {"scale": scale, "eps": eps, "window": window}
    choice = launch.choose(qkv, k_pages, page_table)
    turns = (cos, sin, qk_norms)
    return launched(choice, qkv, *turns, k_pages, v_pages, page_table, seq_lens, arrivals, **static)


def launched(
    choice: launch.Launch,
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,  # int32[>= B * K]
    *,
    scale: float,
    eps: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """``append_decode`` cut up as ``choice`` says; for it and for the tuner."""
    (b, n, h), (page_size, num_kv_heads) = launch.queries_of(qkv, k_pages).shape, k_pages.shape[1:3]
    group, splits = n // num_kv_heads, choice.splits
    if arrivals is None:
        arrivals = jax.new_ref(jnp.zeros(b * num_kv_heads if splits > 1 else 1, jnp.int32))
    absent = seq_lens  # in the place of an array that the kernel does not look at
    parts = (b, num_kv_heads, splits) if splits > 1 else (1, 1, 1)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)  # jax-triton's word for in place
    out, _, _ = jt.triton_call(
        qkv,
        absent if cos is None else cos,
        absent if sin is None else sin,
        absent if qk_norms is None else qk_norms,
        k_ref,
        v_ref,
        page_table,
        seq_lens,
        arrivals,
        kernel=_append_and_attend,
        out_type=(
            jax.ShapeDtypeStruct((b, n, h), qkv.dtype),
            jax.ShapeDtypeStruct((*parts, group, h) if splits > 1 else parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, 2, group) if splits > 1 else parts, jnp.float32),
        ),
        grid=(splits, num_kv_heads, b),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        SCALE=scale * math.log2(math.e),
        EPS=eps,
        HAS_NORMS=qk_norms is not None,
        ROTATE=cos is not None,
        WINDOW=window or 0,
        TABLE_WIDTH=page_table.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_TILE=max(SMALLEST_TILE, power_of_two(group)),
        HEAD_DIM=h,
        DIM_TILE=power_of_two(h),
        PAGE_SIZE=page_size,
        SPLITS=splits,
        BLOCK=choice.block,
    )
    return out, jax.freeze(k_ref), jax.freeze(v_ref)
