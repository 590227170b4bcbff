"""A row's token where few of its logits matter, in Triton, by one program a row.

Owns: a row's first level, the list of what reaches it, and the choice from a short list, which
stays in registers from its search to its draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.levels import (
    EXACTLY,
    NEARLY,
    highest_level,
    key_of,
    level_of_rest,
    nucleus_alone,
    scale,
)
from pallas_kernels.sample.noise import noise_of, row_key, take_better

# Noise lies in -log(log(2**24)) .. -log(-log(1 - 2**-24)), -2.82 .. 16.64: no token that
# much less likely than the most likely one can be drawn.
NOISE_REACH = tl.constexpr(19.5)
# Of a row: its largest scaled logit, what its threshold lies between, sum of exp(scaled - top). The
# upper bound is inf where what reaches the lower need not be narrowed down before it is listed.
BOUNDS = tl.constexpr(4)


@triton.jit
def _first_of_largest(
    logits,  # float32[V] of the row
    best,  # float32[BLOCKS_TILE]: of each block
    number,  # int32[BLOCKS_TILE]
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a greedy row."""
    largest = tl.max(best, 0)
    first = (best == largest) & (number < NUM_BLOCKS)
    index = tl.min(tl.where(first, number, NUM_BLOCKS - 1), 0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
    return tl.min(tl.where((values == largest) & (index < VOCAB), index, VOCAB - 1), 0)


@triton.jit
def _list_reaching(
    logits,  # float32[V] of the row
    heat,
    level,
    blocks,  # int32[FEW_BLOCKS] of the row: which to look at
    num_blocks,
    listed,  # float32[FEW]: scaled logits that are not below the level
    token_ids,  # int32[FEW]
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_TILE: tl.constexpr,
):
    """How many logits reach the level, also of those that find no room in the list."""
    filled = 0
    for start in range(0, num_blocks, FEW_TILE):
        which = start + tl.arange(0, FEW_TILE)
        number = tl.load(blocks + which, mask=which < num_blocks, other=VOCAB)
        index = tl.ravel(number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
        values = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
        scaled = scale(values, heat)
        reaching = ((scaled >= level) & (index < VOCAB)).to(tl.int32)
        place = filled + tl.cumsum(reaching, 0) - 1
        fits = (reaching > 0) & (place < FEW)
        tl.store(listed + place, scaled, mask=fits)
        tl.store(token_ids + place, index, mask=fits)
        filled += tl.sum(reaching, 0)
    return filled


@triton.jit
def _threshold(
    scaled,  # float32[FEW]: all that reach the level
    low,
    top,
    whole,  # sum of exp(scaled - top) of the row, where top_p is alone
    k,
    p,
    share,
    VOCAB: tl.constexpr,
    FEW: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The threshold of a row. The level is none above it, and no lower than min_p's."""
    threshold = low
    if (k > 0) & (k < VOCAB):
        ones = tl.full((FEW,), 1.0, tl.float32)
        needed = k.to(tl.float32)
        threshold = highest_level(scaled, ones, needed, key_of(low), top, EXACTLY, PIVOTS)
    if p < 1:
        weights = tl.where(scaled >= threshold, tl.exp(scaled - top), 0.0)
        if not nucleus_alone(k, p, share, VOCAB):
            whole = tl.sum(weights, 0)
        first = key_of(threshold)
        threshold = highest_level(scaled, weights, p * whole, first, top, EXACTLY, PIVOTS)
    return threshold


@triton.jit
def _draw(
    scaled,  # float32[FEW]
    token_ids,  # int32[FEW]
    threshold,
    key_low,
    key_high,
    VOCAB: tl.constexpr,
    FEW: tl.constexpr,
):
    """The first token with the largest sum of logit and noise; 0 where nothing is kept."""
    u = noise_of(token_ids, key_low, key_high, VOCAB)
    best = tl.full((FEW,), float("-inf"), tl.float32)
    nobody = tl.zeros((FEW,), tl.int32)
    best, token = take_better(best, nobody, scaled, u, token_ids, threshold)  # type: ignore[misc]
    return tl.min(tl.where(best == tl.max(best, 0), token, VOCAB - 1), 0)


@triton.jit
def choose_among_few(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    seed_low,  # int32[B]
    seed_high,  # int32[B]
    positions,  # int32[B]
    tops,  # float32[B, NUM_BLOCKS]: the largest logit of each block
    sums,  # float32[B, NUM_BLOCKS]: of exp(scaled - the block's largest), where top_p is alone
    chosen,  # int32[B]: the row's token; -1: too many logits matter
    bounds,  # float32[B, BOUNDS]; low is the threshold where there is a token
    blocks,  # int32[B, FEW_BLOCKS]: that reach the level
    listed,  # float32[B, FEW]: scaled logits that do
    token_ids,  # int32[B, FEW]
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    FEW_BLOCKS: tl.constexpr,
    FEW_TILE: tl.constexpr,
    FEW: tl.constexpr,
    FEW_PIVOTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    number = tl.arange(0, BLOCKS_TILE)
    is_block = number < NUM_BLOCKS
    best = tl.load(tops + row * NUM_BLOCKS + number, mask=is_block, other=float("-inf"))
    heat = tl.load(temperature + row)
    if heat <= 0:
        token = _first_of_largest(logits, best, number, VOCAB, NUM_BLOCKS, BLOCK)
        tl.store(chosen + row, token)
        return
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    top_of = scale(best, heat)
    top = tl.max(top_of, 0)
    low = top + tl.log(share)  # -inf with a min_p of 0
    high = float("inf")
    whole = 0.0
    if nucleus_alone(k, p, share, VOCAB):
        peaks = tl.where(is_block, tl.exp(top_of - top), 0.0)
        sum_of = tl.load(sums + row * NUM_BLOCKS + number, mask=is_block, other=0.0)
        in_block = peaks * sum_of
        whole = tl.sum(in_block, 0)
        # All that is less likely than this holds less than 1 - p; the margins are for rounding.
        low = top + tl.log((1.0 - p) * whole / VOCAB) - 0.01
        spare = (0.99 * (1.0 - p) - 1e-6) * whole
        low = level_of_rest(top_of, in_block, peaks, spare, low, top, BLOCK, PIVOTS)
        if WIDE * tl.sum((is_block & (top_of < low)).to(tl.int32), 0) < NUM_BLOCKS:
            # the threshold is no higher than where the blocks that reach it hold too little
            high = highest_level(top_of, in_block, p * whole, key_of(low), top, NEARLY, PIVOTS)
    elif (k > 0) & (k <= NUM_BLOCKS) & (k < VOCAB):  # k blocks reach it, so k tokens do
        lowest = key_of(tl.min(tl.where(is_block, top_of, float("inf")), 0))
        ones = tl.full((BLOCKS_TILE,), 1.0, tl.float32)
        level = highest_level(top_of, ones, k.to(tl.float32), lowest, top, NEARLY, PIVOTS)
        low = tl.maximum(low, level)
    if p >= 1:
        low = tl.maximum(low, top - NOISE_REACH)

    token = -1
    reaching = (is_block & (top_of >= low)).to(tl.int32)
    num_blocks = tl.sum(reaching, 0)
    if num_blocks <= FEW_BLOCKS:
        blocks += row * FEW_BLOCKS
        listed += row * FEW
        token_ids += row * FEW
        tl.store(blocks + tl.cumsum(reaching, 0) - 1, number, mask=reaching > 0)
        tl.debug_barrier()  # other threads read the list
        filled = _list_reaching(
            logits, heat, low, blocks, num_blocks, listed, token_ids, VOCAB, BLOCK, FEW, FEW_TILE
        )
        tl.debug_barrier()
        if filled <= FEW:
            place = tl.arange(0, FEW)
            scaled = tl.load(listed + place, mask=place < filled, other=float("-inf"))
            ids = tl.load(token_ids + place, mask=place < filled, other=0)
            low = _threshold(scaled, low, top, whole, k, p, share, VOCAB, FEW, FEW_PIVOTS)
            key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
            token = _draw(scaled, ids, low, key_low, key_high, VOCAB, FEW)
    tl.store(chosen + row, token)
    bounds += row * BOUNDS
    tl.store(bounds, top)
    tl.store(bounds + 1, low)
    tl.store(bounds + 2, high)
    tl.store(bounds + 3, whole)
