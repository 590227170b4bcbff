"""index_topk in Triton: scores of a token's whole context, then a choice that does not sort them.

A CTA of the first kernel has one token and one split of its context. Keys are the rows of its
matmul, so that a thread has most heads of a key, over which scores are summed. In the second kernel
a CTA has all scores of a token, or of a part of a long context. Seven passes over them find the
K-th largest score: each counts the values of the next 5 bits among scores that are equal to it in
the bits before (a radix select: Alabi et al., 2012). Another pass lists the larger scores, and the
first equal ones until there are K, in the order of positions. Of a long context each part lists K,
and the kernel runs again over the lists. XLA's ``top_k`` sorts: 0.16 ms of one row of 152,000
values and 2.6 ms of 256 rows (H200).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.index_topk import launch
from pallas_kernels.index_topk.ref import NO_POSITION, IndexTopkArgs
from pallas_kernels.lib.attention_triton import slots_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.token_tiles import by_tiles
from pallas_kernels.sample.levels import key_of

# Of a pass. A warp counts by a vote for each bit, then each lane adds up its bins: in all passes
# that is 150 instructions for 32 scores, with 8 bits 360 (estimated from the compiler's code).
BITS = tl.constexpr(5)
BINS = tl.constexpr(32)
NONE = tl.constexpr(NO_POSITION)


@triton.jit
def _score(
    q,  # [T, H, D]
    weights,  # float32[T, H]
    pages,  # [P, S, D]
    page_table,  # int32[B, M]
    rows,  # int32[T]
    lens,  # int32[T]
    scores,  # float32[T, M * S]: those of positions below lens are written
    table_width,  # M; this and the next are not constexpr, so all lengths share a kernel
    length,  # M * S
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # a power of two, at least NUM_HEADS
    WIDTH: tl.constexpr,  # D
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys per loop iteration
):
    seen = tl.load(lens + tl.program_id(1))
    per_split = tl.cdiv(tl.cdiv(seen, tl.num_programs(0)), BLOCK) * BLOCK
    start = tl.program_id(0) * per_split
    end = tl.minimum(start + per_split, seen)
    if start >= end:
        return
    token = tl.program_id(1).to(tl.int64)
    components = tl.arange(0, WIDTH)
    heads = tl.arange(0, HEADS)
    in_heads = heads < NUM_HEADS
    at_query = q + (token * NUM_HEADS + heads)[None, :] * WIDTH + components[:, None]
    query = tl.load(at_query, mask=in_heads[None, :], other=0.0)  # [D, H]
    weight = tl.load(weights + token * NUM_HEADS + heads, mask=in_heads, other=0.0)
    page_ids = page_table + tl.load(rows + token).to(tl.int64) * table_width
    own = scores + token * length
    for first in range(start, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < end
        slot = slots_of(page_ids, position, inside, PAGE_SIZE, True)
        at_key = pages + slot[:, None] * WIDTH + components[None, :]
        key = tl.load(at_key, mask=inside[:, None], other=0.0)
        by_head = tl.maximum(tl.dot(key, query, input_precision="ieee"), 0.0)
        tl.store(own + position, tl.sum(by_head * weight[None, :], 1), mask=inside)


@triton.jit
def _keys(score):
    """Unsigned integers that are ordered like the scores; 0 and -0 have the same one."""
    key = key_of(tl.where(score == 0.0, 0.0, score))
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _choose(
    scores,  # float32[T, L]
    listed,  # int32[T, L]: the positions of scores; unused without LISTED
    lens,  # int32[T]
    chosen,  # int32[T, PARTS, K]
    best,  # float32[T, PARTS, K]: the chosen scores; unused without KEEPS
    length,  # L
    part_size,  # positions of a part, of which LISTED has K scores
    width,  # K
    CHUNK: tl.constexpr,  # scores per loop iteration
    LISTED: tl.constexpr,  # scores are those that have been chosen from parts; others are -inf
    KEEPS: tl.constexpr,
):
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    start = part * part_size
    seen = tl.load(lens + token)
    if LISTED:
        count = tl.cdiv(seen, part_size) * width
    else:
        seen = tl.minimum(seen - start, part_size)
        count = seen
        if KEEPS & (seen <= 0):  # nothing reads what such a part has chosen
            return
    own = scores + token * length + start
    at_out = (token * tl.num_programs(0) + part) * width
    offsets = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    threshold = tl.full((), 0, tl.uint32)  # the least key: all positions are chosen
    needed = 0  # of those whose key is the threshold
    if seen > width:
        needed = width
        for shift in tl.static_range(30, -1, -BITS):  # type: ignore[attr-defined]
            counts = tl.zeros((BINS,), tl.int32)
            for first in range(0, count, CHUNK):
                inside = first + offsets < count
                key = _keys(tl.load(own + first + offsets, mask=inside, other=0.0))
                among = inside & ((key >> shift >> BITS) == threshold)
                digit = (key >> shift) & (BINS - 1)
                counts += tl.histogram(digit.to(tl.int32), BINS, mask=among)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            is_digit = (above < needed) & (above + counts >= needed)
            threshold = (threshold << BITS) + tl.sum(tl.where(is_digit, bins, 0), 0).to(tl.uint32)
            needed -= tl.sum(tl.where(is_digit, above, 0), 0)
    filled = 0
    equals = 0
    for first in range(0, count, CHUNK):
        index = first + offsets
        inside = index < count
        score = tl.load(own + index, mask=inside, other=0.0)
        if LISTED:
            # a part that has fewer than K, the last one, lists NONE behind them
            position = tl.load(listed + token * length + index, mask=inside, other=NONE)
        else:
            position = start + index
        key = _keys(score)
        equal = (inside & (key == threshold)).to(tl.int32)
        first_equal = (equal > 0) & (equals + tl.cumsum(equal, 0) <= needed)
        taken = (inside & (key > threshold)) | first_equal
        place = at_out + filled + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + place, position, mask=taken)
        if KEEPS:
            tl.store(best + place, score, mask=taken)
        filled += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for first in range(filled, width, CHUNK):
        rest = first + offsets < width
        place = at_out + first + offsets
        tl.store(chosen + place, tl.full((CHUNK,), NONE, tl.int32), mask=rest)
        if KEEPS:
            tl.store(best + place, tl.full((CHUNK,), float("-inf"), tl.float32), mask=rest)


def index_topk(args: IndexTopkArgs) -> jax.Array:  # int32[T, K]
    """See ``index_topk.api``."""
    return launch_with(launch.scores_config(args), args)


def launch_with(config: launch.ScoresConfig, args: IndexTopkArgs) -> jax.Array:  # int32[T, K]
    """``index_topk`` with a given configuration, for some of the tokens at a time."""

    def of_tile(
        q: jax.Array,  # [W, H, D]
        weights: jax.Array,  # float32[W, H]
        rows: jax.Array,  # int32[W]
        lens: jax.Array,  # int32[W]
    ) -> jax.Array:  # int32[W, K]
        scores, width = _scores(config, args, q, weights, rows, lens), args.width
        parts, size = launch.parts_of(args)
        chosen, best = _chosen(scores, lens, lens, parts, size, width)
        if parts == 1:
            return chosen[:, 0]
        best, listed = (x.reshape(len(lens), parts * width) for x in (best, chosen))
        return _chosen(best, listed, lens, 1, size, width, is_listed=True)[0][:, 0]

    most = launch.most_tokens(args)
    return by_tiles(of_tile, (args.q, args.weights, args.rows, args.lens), most, cap=most)


def _scores(
    config: launch.ScoresConfig,
    args: IndexTopkArgs,
    q: jax.Array,  # [W, H, D]
    weights: jax.Array,  # float32[W, H]
    rows: jax.Array,  # int32[W]
    lens: jax.Array,  # int32[W]
) -> jax.Array:  # float32[W, M * S]
    """The scores of the positions below ``lens``, of some tokens; others are not written."""
    (tokens, heads, width), (table_rows, table_width) = q.shape, args.page_table.shape
    length = launch.length_of(args)
    return jt.triton_call(
        q,
        weights,
        args.pages,
        args.page_table,
        jnp.clip(rows, 0, table_rows - 1),
        lens,
        kernel=_score,
        out_type=jax.ShapeDtypeStruct((tokens, length), jnp.float32),
        grid=(config.splits, tokens),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        table_width=table_width,
        length=length,
        NUM_HEADS=heads,
        HEADS=max(launch.MIN_TILE, power_of_two(heads)),
        WIDTH=width,
        PAGE_SIZE=args.pages.shape[1],
        BLOCK=config.block,
    )


def _chosen(
    scores: jax.Array,  # float32[W, L]
    listed: jax.Array,  # int32[W, L]; unused if they are not listed
    lens: jax.Array,  # int32[W]
    parts: int,
    part_size: int,
    width: int,
    *,
    is_listed: bool = False,
) -> tuple[jax.Array, jax.Array]:  # int32[W, parts, K], float32[W, parts, K]
    """The positions of the largest scores of each part, and of several parts these scores."""
    tokens, length = scores.shape
    chunk = min(launch.CHUNK, power_of_two(length))
    out = jax.ShapeDtypeStruct((tokens, parts, width), jnp.int32)
    kept = jax.ShapeDtypeStruct(out.shape if parts > 1 else (1,), jnp.float32)
    return jt.triton_call(
        scores,
        listed,
        lens,
        kernel=_choose,
        out_type=(out, kept),
        grid=(parts, tokens),
        num_warps=16 if chunk == launch.CHUNK else 4,
        num_stages=1,
        length=length,
        part_size=part_size,
        width=width,
        CHUNK=chunk,
        LISTED=is_listed,
        KEEPS=parts > 1,
    )
