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
    """The tiles of tokens; choices outside [0, num_experts) are in none."""
    pairs, number = choices.size, max_tiles(choices.size, num_experts, width)
    flat = choices.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts)
    firsts = jnp.cumsum(counts) - counts  # of each expert, among the sorted pairs
    own = (counts + width - 1) // width
    ends = jnp.cumsum(own)
    index = jnp.arange(number)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_experts - 1)
    before = (index - (ends - own)[expert]) * width  # rows of the expert in earlier tiles
    rows = jnp.clip(counts[expert] - before, 0, width)
    row = jnp.arange(width)
    sorted_at = (firsts[expert] + before)[:, None] + row
    in_use = row < rows[:, None]
    held = jnp.where(in_use, order[jnp.clip(sorted_at, 0, pairs - 1)], 0)
    at = jnp.arange(number * width, dtype=jnp.int32).reshape(number, width)
    place = jnp.full(pairs + 1, number * width, jnp.int32)
    place = place.at[jnp.where(in_use, held, pairs)].set(at)[:pairs]
    used = jnp.sum(own, dtype=jnp.int32).reshape(1)
    place = place.reshape(choices.shape)
    return Tiles(expert.astype(jnp.int32), rows.astype(jnp.int32), held, place, used)
