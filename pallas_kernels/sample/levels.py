"""Searches in Triton over the bits of a float, and what a row's blocks say of its threshold.

Owns: keys that compare as floats do, and levels that a threshold cannot be below. Must not know:
where logits lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(0x7F800000 + 1))  # of -inf
NEARLY = tl.constexpr(1 << 12)  # keys: a level that near to what was looked for will do


@triton.jit
def key_of(value):
    """An int32 that compares as the float32 does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def pivots_in(low, high, PIVOTS: tl.constexpr):
    """Keys that cut [low, high) evenly; one at least is above low."""
    return low + (high - low) * (1 + tl.arange(0, PIVOTS)) // (PIVOTS + 1)


@triton.jit
def narrowed(low, high, pivots, enough):
    """[low, high) after it is known which pivots have enough at and above them."""
    new_low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    return new_low, tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))


@triton.jit
def level_of_tops(
    tops,  # float32[BLOCKS_TILE]
    weights,  # float32[BLOCKS_TILE]
    needed,
    low,  # a key with enough at and above it
    top,  # the largest of the tops
    PIVOTS: tl.constexpr,
):
    """A level with sum(weights[tops >= level]) >= needed, hardly below the highest such."""
    high = key_of(top).to(tl.int64) + 1
    while high - low > NEARLY:
        pivots = pivots_in(low, high, PIVOTS)
        reached = tops[None, :] >= value_of(pivots)[:, None]
        found = tl.sum(tl.where(reached, weights[None, :], 0.0), 1)
        low, high = narrowed(low, high, pivots, found >= needed)
    return value_of(low)


@triton.jit
def level_of_rest(
    tops,  # float32[BLOCKS_TILE]
    masses,  # float32[BLOCKS_TILE]: of the blocks, relative to the likeliest token
    peaks,  # float32[BLOCKS_TILE]: of each block's likeliest token
    spare,
    low,  # a level below which there is no more than spare
    top,  # the largest of the tops
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """A level below which there is no more mass than ``spare``, by what is known of the blocks: one
    whose top is below has all its mass there. Of another the top is above, and no other token that
    is below weighs more than the level. Tight where few tokens matter."""
    high = key_of(top).to(tl.int64) + 1
    low = key_of(low).to(tl.int64)
    while high - low > NEARLY:
        pivots = pivots_in(low, high, PIVOTS)
        level = value_of(pivots)[:, None]
        others = tl.minimum((masses - peaks)[None, :], (BLOCK - 1) * tl.exp(level - top))
        below = tl.where(tops[None, :] < level, masses[None, :], others)
        low, high = narrowed(low, high, pivots, tl.sum(below, 1) <= spare)
    return value_of(low)
