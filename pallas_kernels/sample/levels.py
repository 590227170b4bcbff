"""Searches in Triton over the bits of a float, and what a row's blocks say of its threshold.

Owns: keys that compare as floats do, and levels that a threshold cannot be below.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEARLY = tl.constexpr(1 << 12)  # keys: a level that near to what was looked for will do
EXACTLY = tl.constexpr(1)
KEYS_NEAR = tl.constexpr(8)
LAST_KEY = tl.constexpr(0x7FFFFFFF)
GREATEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def scale(logits, temperature):
    """Logits over the temperature, rounded as a division is: thresholds compare these. What is -inf
    is not divided: that takes several times as long."""
    finite = logits > float("-inf")
    return tl.where(finite, tl.div_rn(tl.where(finite, logits, 1.0), temperature), float("-inf"))


@triton.jit
def scaled_at(logits, index, mask, temperature):
    """Scaled logits; -inf, and not read, where the mask is false."""
    return scale(tl.load(logits + index, mask=mask, other=float("-inf")), temperature)


@triton.jit
def inverse(temperature):
    """Finite, so that it can take a logit of 0. By it logits are scaled where a rounding decides
    nothing: a division is some ten instructions."""
    return tl.minimum(1.0 / temperature, GREATEST)


@triton.jit
def least_of(level, temperature):
    """The least logit that reaches the level, so that logits compare as scaled ones do: inf if the
    level is. The product is less than three keys from it, as both roundings are of half a key but
    below 2**-126, where no two logits of a model differ."""
    near = level * temperature
    keys = key_of(near) + tl.arange(0, KEYS_NEAR) - KEYS_NEAR // 2
    reached = scale(value_of(keys), temperature) >= level
    least = value_of(tl.min(tl.where(reached, keys, LAST_KEY), 0))
    return tl.where(tl.abs(level) < float("inf"), least, level)


@triton.jit
def nucleus_alone(k, p, min_p, VOCAB: tl.constexpr):
    """Whether top_p is the row's only filter. Any other leaves a level to begin from."""
    return (p < 1) & ((k <= 0) | (k >= VOCAB)) & ~(min_p > 0)


@triton.jit
def key_of(value):
    """An int32 that compares as the float32 does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def span(low, high):
    """How many keys [low, high) holds; none where high is not above low. All in 32 bits: every
    thread works out every pivot."""
    keys = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    return tl.where(high > low, keys, 0)


@triton.jit
def pivots_in(low, high, PIVOTS: tl.constexpr):
    """Keys above low that cut [low, high) evenly; of a span of few keys some are not below high."""
    step = tl.maximum(span(low, high) // (PIVOTS + 1), 1).to(tl.int32)
    return low + step * (1 + tl.arange(0, PIVOTS))


@triton.jit
def narrowed(low, high, pivots, enough):
    """[low, high) after it is known which pivots have enough at and above them."""
    new_low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    return new_low, tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))


@triton.jit
def highest_level(
    values,  # float32[N]
    weights,  # float32[N]
    needed,
    low,  # a key with enough at and above it
    top,  # the largest of the values
    NEAR: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """A level with sum(weights[values >= level]) >= needed, less than NEAR keys below the highest
    such. The sum of a level is no larger than that of a lower one, also as rounded."""
    high = key_of(top) + 1
    while span(low, high) > NEAR:
        pivots = pivots_in(low, high, PIVOTS)
        reached = values[None, :] >= value_of(pivots)[:, None]
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
    high = key_of(top) + 1
    low = key_of(low)
    while span(low, high) > NEARLY:
        pivots = pivots_in(low, high, PIVOTS)
        level = value_of(pivots)[:, None]
        others = tl.minimum((masses - peaks)[None, :], (BLOCK - 1) * tl.exp(level - top))
        below = tl.where(tops[None, :] < level, masses[None, :], others)
        low, high = narrowed(low, high, pivots, tl.sum(below, 1) <= spare)
    return value_of(low)
