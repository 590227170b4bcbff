"""Scores of some tokens for the keys of their contexts, which are read some pages at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

KEYS_PER_BLOCK = 512


def block_pages(page_size: int, multiple: int = 1) -> int:
    """The pages of a block of about ``KEYS_PER_BLOCK`` keys, whose number is a multiple of
    ``multiple`` pages.
    """
    return multiple * max(1, KEYS_PER_BLOCK // (multiple * page_size))


def padded_table(page_table: jax.Array, pages: int) -> jax.Array:  # int32[B, M] -> int32[B, M']
    """The table with whole blocks of so many pages."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))


def context_scores(
    pages: jax.Array,  # [P, S, D]
    ids: jax.Array,  # int32[W, M]: whole blocks of pages
    lens: jax.Array,  # int32[W]
    score: Callable[[jax.Array], jax.Array],  # of keys [W, L, D] -> float32[W, ..., L]
    *,
    block: int,  # pages
    merged: int = 1,
) -> jax.Array:  # float32[W, ..., M * S / merged]
    """The scores of the keys at positions below ``lens``, of others -inf.

    Of each ``merged`` adjacent positions it is the largest.
    """
    length = block * pages.shape[1]

    def of_block(i: jax.Array) -> jax.Array:  # float32[W, ..., L / merged]
        own = jax.lax.dynamic_slice_in_dim(ids, i * block, block, axis=1)
        keys = pages.at[own].get(mode="clip").reshape(len(ids), length, -1)
        found = score(keys)
        seen = i * length + jnp.arange(length) < lens[:, None]
        seen = seen.reshape(len(ids), *(1,) * (found.ndim - 2), length)
        found = jnp.where(seen, found, -jnp.inf)  # unwritten slots may hold NaN
        return found.reshape(*found.shape[:-1], -1, merged).max(-1) if merged > 1 else found

    def body(i: jax.Array, scores: jax.Array) -> jax.Array:  # float32[W, ..., M * S / merged]
        start = i * (length // merged)
        return jax.lax.dynamic_update_slice_in_dim(scores, of_block(i), start, axis=-1)

    shape = jax.eval_shape(of_block, jnp.int32(0)).shape[:-1]
    scores = jnp.full((*shape, ids.shape[1] * pages.shape[1] // merged), -jnp.inf)
    blocks = jax.lax.div(jnp.max(lens) + (length - 1), length)
    return jax.lax.fori_loop(0, blocks, body, scores)
