"""Online softmax: attention over keys that arrive block by block.

Owns: ``SoftmaxState``, its initial value, update factors and final result, and the reading of a
block of pages. The method is that of FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.page_scales import values_of

# Keys per loop iteration. Fixed, so that the summation order of a row, and with it the row's bits,
# depends on the row alone; decode and prefill share it for the same reason.
KEYS_PER_BLOCK = 128


class SoftmaxState(NamedTuple):
    """Softmax state of queries over the keys so far."""

    m_i: jax.Array  # float32[...]: largest score, -inf before any visible key
    l_i: jax.Array  # float32[...]: sum of exp(score - m_i)
    acc: jax.Array  # float32[..., H]: sum of exp(score - m_i) * value


def init_state(
    shape: tuple[int, ...],
    head_dim: int,
    sinks: jax.Array | None = None,
    values: jax.Array | None = None,  # [..., H]
) -> SoftmaxState:
    """The state before any key, for queries of the given shape.

    ``sinks``, of a shape that broadcasts to it, are the scores of a key that all queries see, whose
    value is 0 or one of ``values``.
    """
    acc = jnp.zeros((*shape, head_dim)) if values is None else values.astype(jnp.float32)
    if sinks is None:
        return SoftmaxState(jnp.full(shape, -jnp.inf), jnp.zeros(shape), acc)
    first = jnp.broadcast_to(sinks.astype(jnp.float32), shape)
    return SoftmaxState(first, jnp.ones(shape), acc)


def capped(scores: jax.Array, cap: float | None) -> jax.Array:  # [...] -> [...]
    """Scores x as c tanh(x / c) with a ``cap`` c (Gemma 2)."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def biased(
    scores: jax.Array,  # [...]
    slopes: jax.Array | None,  # [N], of a shape that broadcasts to the scores
    distance: jax.Array,  # int32: of the key before its query, likewise
    *,
    root: bool = False,
) -> jax.Array:  # [...]
    """Scores less the slope of their head times the distance (ALiBi: Press et al. 2021,
    arXiv:2108.12409), or with ``root`` its square root (Step 1).
    """
    if slopes is None:
        return scores
    far = distance.astype(jnp.float32)
    if root:  # a key behind its query is masked, and must not be NaN
        far = jnp.sqrt(jnp.maximum(far, 0.0))
    return scores - slopes * far


def block_weights(
    state: SoftmaxState, scores: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The new maximum, the factor ``alpha`` that rescales ``l_i`` and ``acc``, and the weights
    ``p`` = exp(scores - maximum) of a block.

    Keys lie along ``axis`` of ``scores``; a masked key scores -inf and has weight 0.
    """
    m_ij = jnp.maximum(state.m_i, jnp.max(scores, axis))
    # A query without a visible key keeps -inf; it subtracts 0, since -inf - -inf would be NaN.
    base = jnp.where(m_ij == -jnp.inf, 0.0, m_ij)
    return m_ij, jnp.exp(state.m_i - base), jnp.exp(scores - jnp.expand_dims(base, axis))


def attention_output(state: SoftmaxState) -> jax.Array:  # float32[..., H]
    """``acc / l_i``; zeros for a query without a visible key."""
    return state.acc / jnp.where(state.l_i == 0.0, 1.0, state.l_i)[..., None]


def pages_per_block(page_size: int) -> int:
    """Pages per block of keys; one when a page is larger than a block."""
    return max(1, KEYS_PER_BLOCK // page_size)


def read_block(
    pages: jax.Array,  # [P, S, ...]
    page_ids: jax.Array,  # int32[pages of the block]
    scales: jax.Array | None = None,  # float32[P, S, K]: of 8-bit pages
) -> jax.Array:  # float32[keys, ...]
    """A block of keys, values or entries. Ids out of range are clipped; the caller masks those."""
    block = pages.at[page_ids].get(mode="clip")  # [pages of the block, S, K, H]
    block = values_of(block.reshape(-1, *pages.shape[2:]))
    if scales is None:
        return block
    return block * scales.at[page_ids].get(mode="clip").reshape(-1, scales.shape[2], 1)
