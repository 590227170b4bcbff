"""Attention over keys that arrive block by block: the running state of an online softmax.

Owns: ``Running`` and its three steps, and the reading of a block of pages. The method is that of
FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Keys that one step of the loop reads. Fixed, so that the order of a row's sums, and with it the
# row's bits, depends on nothing but the row; decode and prefill share it for the same reason.
KEYS_PER_BLOCK = 128


class Running(NamedTuple):
    """Sums over the keys seen so far, relative to the largest score."""

    top: jax.Array  # float32[...]: largest score, -inf before any visible key
    total: jax.Array  # float32[...]: sum of exp(score - top)
    mixed: jax.Array  # float32[..., H]: sum of exp(score - top) * value


def start(shape: tuple[int, ...], head_dim: int) -> Running:
    """Nothing seen yet, for queries of the given shape."""
    return Running(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def weigh(running: Running, scores: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The new top, the factor that old sums shrink by, and the weights of a block's scores.

    Keys lie along ``axis`` of ``scores``; an invisible key scores -inf and weighs 0.
    """
    top = jnp.maximum(running.top, jnp.max(scores, axis))
    # A query that has seen nothing keeps -inf; it subtracts 0, since -inf - -inf would be NaN.
    base = jnp.where(top == -jnp.inf, 0.0, top)
    return top, jnp.exp(running.top - base), jnp.exp(scores - jnp.expand_dims(base, axis))


def finish(running: Running) -> jax.Array:  # float32[..., H]
    """The weighted mean of the values; zeros for a query that saw nothing."""
    return running.mixed / jnp.where(running.total == 0.0, 1.0, running.total)[..., None]


def pages_per_block(page_size: int) -> int:
    """Pages that make up one block; one when a page is larger than a block."""
    return max(1, KEYS_PER_BLOCK // page_size)


def read_block(
    pages: jax.Array,  # [P, S, K, H]
    page_ids: jax.Array,  # int32[pages of the block]
) -> jax.Array:  # float32[keys, K, H]
    """The keys (or values) of a block; junk ids read some page, which the caller masks."""
    _, page_size, num_kv_heads, head_dim = pages.shape
    block = pages.at[page_ids].get(mode="clip")
    return block.reshape(page_ids.size * page_size, num_kv_heads, head_dim).astype(jnp.float32)
