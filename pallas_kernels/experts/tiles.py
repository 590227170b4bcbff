"""Tokens sorted by expert: tiles of rows, each of one expert.

A pair is a token with one of its choices, number t * k + j. Sorted by expert, the pairs of an
expert are consecutive; they are cut into tiles of at most ``width``. No pair is dropped and none is
added: a tile of fewer rows says so.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles in the order of experts; unused ones, at the end, have no rows."""

    expert: jax.Array  # int32[N]
    rows: jax.Array  # int32[N]: rows in use
    pairs: jax.Array  # int32[N, width]: the pair of each row; 0 for rows that are not used
    place: jax.Array  # int32[T, k]: tile * width + row of each pair; N * width for no expert
    used: jax.Array  # int32[1]: tiles that have rows


def max_tiles(num_pairs: int, num_experts: int, width: int) -> int:
    """The most tiles that so many pairs can fill."""
    return min(num_experts, num_pairs) + num_pairs // width


def tiles_of(choices: jax.Array, num_experts: int, width: int) -> Tiles:  # int32[T, k]
    """The tiles of tokens; choices outside [0, num_experts) are in none.

    Pairs are ranked by counting, without a sort, which takes longer to compile.
    """
    pairs, number = choices.size, max_tiles(choices.size, num_experts, width)
    own = choices.reshape(-1, 1) == jnp.arange(num_experts)  # [pairs, E]
    ranks = jnp.cumsum(own, axis=0, dtype=jnp.int32)  # from 1, among the pairs of each expert
    counts = ranks[-1]
    tiles = (counts + width - 1) // width
    ends = jnp.cumsum(tiles)
    rank = jnp.sum(jnp.where(own, ranks - 1, 0), axis=1)
    first = jnp.sum(jnp.where(own, ends - tiles, 0), axis=1)
    place = jnp.where(own.any(axis=1), first * width + rank, number * width)
    held = jnp.zeros(number * width, jnp.int32)
    held = held.at[place].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    index = jnp.arange(number)
    expert = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1), num_experts - 1)
    before = (index - (ends - tiles)[expert]) * width  # rows of the expert in earlier tiles
    rows = jnp.clip(counts[expert] - before, 0, width)
    held, place = held.reshape(number, width), place.reshape(choices.shape)
    return Tiles(expert, rows, held, place, ends[-1:])
