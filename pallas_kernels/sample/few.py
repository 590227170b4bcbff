"""Sampling of rows with few candidates, in Triton, with one CTA per row.

Owns: a row's first level, the list of candidates that reach it, and the draw from a short list,
which stays in registers from the search to the draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.levels import (
    COARSE,
    EXACT,
    highest_level,
    key_of,
    level_of_tail,
    nucleus_alone,
    scale,
)
from pallas_kernels.sample.noise import noise_of, row_key, take_better

# Noise is between -log(log(2**24)) and -log(-log(1 - 2**-24)), -2.82 and 16.64: no token whose
# scaled logit is this far below the largest can be drawn.
NOISE_REACH = tl.constexpr(19.5)
# Values per row: the largest scaled logit, lower and upper bound of the threshold, and the sum of
# exp(scaled - row_max). The upper bound is inf where candidates can be listed without narrowing.
BOUNDS = tl.constexpr(4)


@triton.jit
def _first_of_largest(
    logits,  # float32[V] of the row
    block_best,  # float32[BLOCKS_TILE]: of each block
    number,  # int32[BLOCKS_TILE]
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a greedy row."""
    largest = tl.max(block_best, 0)
    first = (block_best == largest) & (number < NUM_BLOCKS)
    index = tl.min(tl.where(first, number, NUM_BLOCKS - 1), 0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
    return tl.min(tl.where((values == largest) & (index < VOCAB), index, VOCAB - 1), 0)


@triton.jit
def _list_candidates(
    logits,  # float32[V] of the row
    temp,
    level,
    blocks,  # int32[FEW_BLOCKS]: the row's blocks to read
    num_blocks,
    candidates,  # float32[FEW]: scaled logits that are not below the level
    token_ids,  # int32[FEW]
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_TILE: tl.constexpr,
):
    """Number of logits that reach the level, including those that do not fit in the list."""
    filled = 0
    for start in range(0, num_blocks, FEW_TILE):
        which = start + tl.arange(0, FEW_TILE)
        number = tl.load(blocks + which, mask=which < num_blocks, other=VOCAB)
        index = tl.ravel(number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
        values = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
        scaled = scale(values, temp)
        reaches = ((scaled >= level) & (index < VOCAB)).to(tl.int32)
        place = filled + tl.cumsum(reaches, 0) - 1
        fits = (reaches > 0) & (place < FEW)
        tl.store(candidates + place, scaled, mask=fits)
        tl.store(token_ids + place, index, mask=fits)
        filled += tl.sum(reaches, 0)
    return filled


@triton.jit
def _threshold(
    scaled,  # float32[FEW]: all that reach the level
    low,
    row_max,
    total_mass,  # sum of exp(scaled - row_max) over the row, if top_p is the only filter
    k,
    p,
    p_min,
    VOCAB: tl.constexpr,
    FEW: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The threshold of a row, given a lower bound that includes min_p's threshold."""
    threshold = low
    if (k > 0) & (k < VOCAB):
        ones = tl.full((FEW,), 1.0, tl.float32)
        needed = k.to(tl.float32)
        threshold = highest_level(scaled, ones, needed, key_of(low), row_max, EXACT, PIVOTS)
    if p < 1:
        weights = tl.where(scaled >= threshold, tl.exp(scaled - row_max), 0.0)
        if not nucleus_alone(k, p, p_min, VOCAB):
            total_mass = tl.sum(weights, 0)
        first = key_of(threshold)
        threshold = highest_level(scaled, weights, p * total_mass, first, row_max, EXACT, PIVOTS)
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
    """The first token with the largest sum of logit and noise; 0 if no token is kept."""
    u = noise_of(token_ids, key_low, key_high, VOCAB)
    best = tl.full((FEW,), float("-inf"), tl.float32)
    no_token = tl.zeros((FEW,), tl.int32)
    best, token = take_better(best, no_token, scaled, u, token_ids, threshold)  # type: ignore[misc]
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
    block_max,  # float32[B, NUM_BLOCKS]: the largest logit of each block
    block_sums,  # float32[B, NUM_BLOCKS]: sum of exp(scaled - block max), for top_p alone
    chosen,  # int32[B]: the row's token; -1: too many candidates
    bounds,  # float32[B, BOUNDS]; the lower bound is the threshold of a row with a token
    blocks,  # int32[B, FEW_BLOCKS]: blocks that reach the level
    candidates,  # float32[B, FEW]: scaled logits that reach the level
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
    block_best = tl.load(block_max + row * NUM_BLOCKS + number, mask=is_block, other=float("-inf"))
    temp = tl.load(temperature + row)
    if temp <= 0:
        token = _first_of_largest(logits, block_best, number, VOCAB, NUM_BLOCKS, BLOCK)
        tl.store(chosen + row, token)
        return
    k, p, p_min = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    scaled_max = scale(block_best, temp)
    row_max = tl.max(scaled_max, 0)
    low = row_max + tl.log(p_min)  # -inf with a min_p of 0
    high = float("inf")
    total_mass = 0.0
    if nucleus_alone(k, p, p_min, VOCAB):
        peaks = tl.where(is_block, tl.exp(scaled_max - row_max), 0.0)
        sum_of = tl.load(block_sums + row * NUM_BLOCKS + number, mask=is_block, other=0.0)
        in_block = peaks * sum_of
        total_mass = tl.sum(in_block, 0)
        # Tokens less likely than this sum to less than 1 - p; the margins cover rounding.
        low = row_max + tl.log((1.0 - p) * total_mass / VOCAB) - 0.01
        spare = (0.99 * (1.0 - p) - 1e-6) * total_mass
        low = level_of_tail(scaled_max, in_block, peaks, spare, low, row_max, BLOCK, PIVOTS)
        if WIDE * tl.sum((is_block & (scaled_max < low)).to(tl.int32), 0) < NUM_BLOCKS:
            # above this level even whole blocks have too little mass
            high = highest_level(
                scaled_max, in_block, p * total_mass, key_of(low), row_max, COARSE, PIVOTS
            )
    elif (k > 0) & (k <= NUM_BLOCKS) & (k < VOCAB):  # k blocks reach it, so k tokens do
        lowest = key_of(tl.min(tl.where(is_block, scaled_max, float("inf")), 0))
        ones = tl.full((BLOCKS_TILE,), 1.0, tl.float32)
        level = highest_level(scaled_max, ones, k.to(tl.float32), lowest, row_max, COARSE, PIVOTS)
        low = tl.maximum(low, level)
    if p >= 1:
        low = tl.maximum(low, row_max - NOISE_REACH)

    token = -1
    reaches = (is_block & (scaled_max >= low)).to(tl.int32)
    num_blocks = tl.sum(reaches, 0)
    if num_blocks <= FEW_BLOCKS:
        blocks += row * FEW_BLOCKS
        candidates += row * FEW
        token_ids += row * FEW
        tl.store(blocks + tl.cumsum(reaches, 0) - 1, number, mask=reaches > 0)
        tl.debug_barrier()  # other threads read the list
        filled = _list_candidates(
            logits,
            temp,
            low,
            blocks,
            num_blocks,
            candidates,
            token_ids,
            VOCAB,
            BLOCK,
            FEW,
            FEW_TILE,
        )
        tl.debug_barrier()
        if filled <= FEW:
            place = tl.arange(0, FEW)
            scaled = tl.load(candidates + place, mask=place < filled, other=float("-inf"))
            ids = tl.load(token_ids + place, mask=place < filled, other=0)
            low = _threshold(scaled, low, row_max, total_mass, k, p, p_min, VOCAB, FEW, FEW_PIVOTS)
            key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
            token = _draw(scaled, ids, low, key_low, key_high, VOCAB, FEW)
    tl.store(chosen + row, token)
    bounds += row * BOUNDS
    tl.store(bounds, row_max)
    tl.store(bounds + 1, low)
    tl.store(bounds + 2, high)
    tl.store(bounds + 3, total_mass)
