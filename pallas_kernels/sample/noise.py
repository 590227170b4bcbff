"""Gumbel noise in Triton, and the comparison of tokens with it.

Owns: the noise of a token id under a row's key.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounds(x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Four rounds of Threefry-2x32."""
    x = x + y
    y = (y << A | y >> (32 - A)) ^ x
    x = x + y
    y = (y << B | y >> (32 - B)) ^ x
    x = x + y
    y = (y << C | y >> (32 - C)) ^ x
    x = x + y
    y = (y << D | y >> (32 - D)) ^ x
    return x, y


@triton.jit
def threefry(low, high, counter):
    """Both words of Threefry-2x32 with 20 rounds for the counter pairs (counter, 0)."""
    third = low ^ high ^ 0x1BD11BDA
    second = high + tl.zeros_like(counter)
    x, y = _rounds(counter + low, second, 13, 15, 26, 6)  # type: ignore[misc]
    x, y = _rounds(x + high, y + third + 1, 17, 29, 16, 24)
    x, y = _rounds(x + third, y + low + 2, 13, 15, 26, 6)
    x, y = _rounds(x + low, y + high + 3, 17, 29, 16, 24)
    x, y = _rounds(x + high, y + third + 4, 13, 15, 26, 6)
    return x + third, y + low + 5


@triton.jit
def row_key(seed_low, seed_high, position):
    """Both words of a row's key, from pointers to its seed and position."""
    word_low = tl.load(seed_low).to(tl.uint32, bitcast=True)
    word_high = tl.load(seed_high).to(tl.uint32, bitcast=True)
    return threefry(word_low, word_high, tl.load(position).to(tl.uint32, bitcast=True))


@triton.jit
def uniform(word):
    """23 bits to the middle of 2**23 equal steps: never 0, never 1."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def noise_of(index, key_low, key_high, VOCAB: tl.constexpr):
    """The uniform numbers of token ids, in any order."""
    HALF: tl.constexpr = (VOCAB + 1) // 2  # a counter's two words are for tokens HALF apart
    second = index >= HALF
    counter = tl.where(second, index - HALF, index).to(tl.uint32)
    x, y = threefry(key_low, key_high, counter)  # type: ignore[misc]
    return uniform(tl.where(second, y, x))


@triton.jit
def can_exceed(scaled, u, level):
    """True if the sum of a logit and its noise may exceed the level, at a tenth of the cost of the
    noise: since -log(u) >= 1 - u, noise is at most -log(1 - u). The margin covers rounding, also of
    a logit scaled by a multiplication."""
    return 1.0 - u < tl.exp(scaled - level + (1e-4 + 1e-6 * tl.abs(level)))


@triton.jit
def take_better(best, token, scaled, u, index, threshold):
    """The larger sum of logit and noise, and its token; of equal sums the first."""
    noisy = scaled - tl.log(-tl.log(u))  # tl.log is exact to its last bit, also near 1
    better = (noisy > best) | ((noisy == best) & (index < token))
    better &= (scaled >= threshold) & (scaled > float("-inf"))
    return tl.where(better, noisy, best), tl.where(better, index, token)
