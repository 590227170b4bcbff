"""Hashes of n-grams of token ids: products with 63-bit numbers, their exclusive or, remainders; or
the remainders of polynomials.

JAX has integers of 32 bits here, so that one of 64 bits is a pair of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_HALF, _LOW, _WORD = 16, 0xFFFF, 0xFFFFFFFF
_BITS = 64
MOST_ROWS = 1 << 31  # a remainder and one further bit fit into 32 bits


class Wide(NamedTuple):
    """Integers of 64 bits."""

    high: jax.Array  # uint32[...]
    low: jax.Array  # uint32[...]

    def bits(self, start: int, count: int) -> jax.Array:  # uint32[...]
        """``count`` bits, fewer than 32, from bit ``start`` on."""
        found = self.high >> max(start - 32, 0)
        if start < 32:
            found = self.low >> start
            found = found | (self.high << (32 - start)) if start else found
        return found & ((1 << count) - 1)


def ngram_rows(
    tokens: Sequence[jax.Array],  # int32[T] each: a token, the one before it, and so on
    multipliers: Sequence[int],  # of each
    sizes: Sequence[int],  # of the parts of the table, those of 2-grams first
) -> jax.Array:  # int32[T, len(sizes)]
    """The rows of a token's n-grams of 2 up to ``len(tokens)`` tokens; the parts of the table
    follow each other.

    The hash is the exclusive or of the tokens' products with their multipliers, modulo the part's
    size (``modeling_qwen4_exp`` of Hugging Face transformers).
    """
    each = len(sizes) // (len(tokens) - 1)
    starts = np.cumsum((0, *sizes[:-1])).astype(np.int32)
    mixed = _product(tokens[0].astype(jnp.uint32), multipliers[0])
    found: list[jax.Array] = []
    for i, (token, multiplier) in enumerate(zip(tokens[1:], multipliers[1:], strict=True)):
        other = _product(token.astype(jnp.uint32), multiplier)
        mixed = Wide(mixed.high ^ other.high, mixed.low ^ other.low)
        columns = Wide(mixed.high[:, None], mixed.low[:, None])
        found.append(_remainders(columns, sizes[i * each : (i + 1) * each]))
    return jnp.concatenate(found, axis=1).astype(jnp.int32) + starts


def polynomial_rows(
    tokens: Sequence[jax.Array],  # int32[T] each: a token, the one before it, and so on
    base: int,  # the size of the vocabulary
    sizes: Sequence[int],  # of the parts of the table, those of 2-grams first
) -> jax.Array:  # int32[T, len(sizes)]
    """The rows of a token's n-grams of 2 up to ``len(tokens)`` tokens, as ``ngram_rows``.

    The hash is the polynomial in ``base`` whose coefficients are the tokens, the last one's that of
    power 0, modulo the part's size (LongCat-Flash-Lite).
    """
    each = len(sizes) // (len(tokens) - 1)
    starts = np.cumsum((0, *sizes[:-1])).astype(np.int32)
    ids = [token.astype(jnp.uint32)[:, None] for token in tokens]
    found: list[jax.Array] = []
    for i in range(1, len(tokens)):
        own = sizes[(i - 1) * each : i * each]
        rest = ids[i] % jnp.asarray(own, jnp.uint32)  # [T, each]
        for token in ids[i - 1 :: -1]:  # Horner's rule
            high, product = _product(rest, base)
            low = product + token
            rest = _remainders(Wide(high + (low < token).astype(jnp.uint32), low), own)
        found.append(rest)
    return jnp.concatenate(found, axis=1).astype(jnp.int32) + starts


def _product(tokens: jax.Array, multiplier: int) -> Wide:  # of uint32[T]
    """The products modulo 2 ** 64."""
    first, second = tokens & _LOW, tokens >> _HALF
    low, high = multiplier & _LOW, (multiplier >> _HALF) & _LOW
    lowest = first * low
    middle = second * low + (lowest >> _HALF)  # no sum here exceeds 32 bits
    other = first * high + (middle & _LOW)
    upper = second * high + (middle >> _HALF) + (other >> _HALF)
    above = tokens * jnp.uint32((multiplier >> 32) & _WORD)
    return Wide(upper + above, (other << _HALF) | (lowest & _LOW))


def _remainders(numbers: Wide, sizes: Sequence[int]) -> jax.Array:  # uint32[T, len(sizes)]
    """The numbers [T, 1], or [T, len(sizes)], modulo each size: a long division, as many bits at a
    time as fit.
    """
    at_once = 32 - max(sizes).bit_length()
    by = jnp.asarray(sizes, jnp.uint32)
    rest, end = jnp.zeros((), jnp.uint32), _BITS
    while end:
        start = max(end - at_once, 0)
        digits = numbers.bits(start, end - start)
        rest = ((rest << (end - start)) | digits) % by
        end = start
    return rest
