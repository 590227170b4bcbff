"""Searches in Triton over the bits of a float, and bounds on a row's threshold from its blocks.

Owns: integer keys that are ordered like floats, and lower bounds of thresholds.
"""

from __future__ import annotations

import triton
import triton.language as tl

COARSE = tl.constexpr(1 << 12)  # tolerance of a search, in keys
EXACT = tl.constexpr(1)
KEYS_NEAR = tl.constexpr(8)
LAST_KEY = tl.constexpr(0x7FFFFFFF)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)  # largest float32


@triton.jit
def scale(logits, temperature):
    """Logits over the temperature, rounded as by a division, as thresholds are compared with them.
    -inf is not divided: that is several times slower."""
    finite = logits > float("-inf")
    return tl.where(finite, tl.div_rn(tl.where(finite, logits, 1.0), temperature), float("-inf"))


@triton.jit
def scaled_at(logits, index, mask, temperature):
    """Scaled logits; -inf, and not read, where the mask is false."""
    return scale(tl.load(logits + index, mask=mask, other=float("-inf")), temperature)


@triton.jit
def inverse(temperature):
    """1 / temperature, finite, so that 0 times it is 0. Logits are multiplied by it where rounding
    does not matter: a division is about ten instructions."""
    return tl.minimum(1.0 / temperature, FLOAT32_MAX)


@triton.jit
def least_of(level, temperature):
    """The smallest logit whose scaled value has_enough the level; inf if the level is inf.

    ``level * temperature`` is less than three keys from it: both roundings are by half a key,
    except below 2**-126, where logits of a model do not differ."""
    near = level * temperature
    keys = key_of(near) + tl.arange(0, KEYS_NEAR) - KEYS_NEAR // 2
    reached = scale(value_of(keys), temperature) >= level
    least = value_of(tl.min(tl.where(reached, keys, LAST_KEY), 0))
    return tl.where(tl.abs(level) < float("inf"), least, level)


@triton.jit
def nucleus_alone(k, p, min_p, VOCAB: tl.constexpr):
    """True if top_p is the row's only filter; other filters give a lower bound to start from."""
    return (p < 1) & ((k <= 0) | (k >= VOCAB)) & ~(min_p > 0)


@triton.jit
def key_of(value):
    """An int32 that is ordered like the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def span(low, high):
    """Number of keys in [low, high); 0 if high is not above low. In 32 bits, since every thread
    computes every pivot."""
    keys = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    return tl.where(high > low, keys, 0)


@triton.jit
def pivots_in(low, high, PIVOTS: tl.constexpr):
    """Keys that divide [low, high) evenly; in a span of few keys some are not below high."""
    step = tl.maximum(span(low, high) // (PIVOTS + 1), 1).to(tl.int32)
    return low + step * (1 + tl.arange(0, PIVOTS))


@triton.jit
def narrowed(low, high, pivots, has_enough):
    """[low, high) narrowed by which pivots have enough weight at and above them."""
    new_low = tl.maximum(low, tl.max(tl.where(has_enough, pivots, low), 0))
    return new_low, tl.minimum(high, tl.min(tl.where(has_enough, high, pivots), 0))


@triton.jit
def highest_level(
    values,  # float32[N]
    weights,  # float32[N]
    needed,
    low,  # a key with enough weight at and above it
    row_max,  # largest value
    NEAR: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """A level with sum(weights[values >= level]) >= needed, less than NEAR keys below the highest
    such level. Sums do not increase with the level, also after rounding."""
    high = key_of(row_max) + 1
    while span(low, high) > NEAR:
        pivots = pivots_in(low, high, PIVOTS)
        reached = values[None, :] >= value_of(pivots)[:, None]
        found = tl.sum(tl.where(reached, weights[None, :], 0.0), 1)
        low, high = narrowed(low, high, pivots, found >= needed)
    return value_of(low)


@triton.jit
def level_of_tail(
    block_max,  # float32[BLOCKS_TILE]
    masses,  # float32[BLOCKS_TILE]: probability of each block, relative to the likeliest token
    peaks,  # float32[BLOCKS_TILE]: probability of each block's likeliest token
    spare,
    low,  # a level below which there is at most ``spare``
    row_max,  # largest of block_max
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """A level below which there is at most the mass ``spare``, from block summaries: a block whose
    maximum is below the level has all its mass below; of another block at most all other tokens,
    each with at most the level's weight. Tight if few tokens matter."""
    high = key_of(row_max) + 1
    low = key_of(low)
    while span(low, high) > COARSE:
        pivots = pivots_in(low, high, PIVOTS)
        level = value_of(pivots)[:, None]
        others = tl.minimum((masses - peaks)[None, :], (BLOCK - 1) * tl.exp(level - row_max))
        below = tl.where(block_max[None, :] < level, masses[None, :], others)
        low, high = narrowed(low, high, pivots, tl.sum(below, 1) <= spare)
    return value_of(low)
