"""Drafts: tokens proposed for decode rows, and the number of them that the model accepts.

A draw is a function of logits, seed and position alone (``pallas_kernels.sample``). So as long as
the drafts of a row of k + 1 tokens equal the draws, its draws equal those of k + 1 steps of one
token. A drafter never changes the tokens, and no rejection sampler is needed. (Leviathan et al.,
arXiv 2211.17192, accept drafts at random, which preserves only the distribution.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

NO_TOKEN = -1  # follows the last accepted token of a row


@dataclass(frozen=True)
class Drafter:
    """Proposes ``count`` tokens per row.

    ``propose(history, lens)`` returns int32[D, count]. ``history`` int32[D, L] are the tokens of
    each sequence, and ``lens`` int32[D] their numbers. It is traced as a part of the step.
    """

    count: int
    propose: Callable[[jax.Array, jax.Array], jax.Array]


def num_accepted(
    drafts: jax.Array,  # int32[D, Q - 1]
    draws: jax.Array,  # int32[D, Q]: drawn after each token of the row
    limits: jax.Array,  # int32[D]
) -> jax.Array:  # int32[D]
    """The number of leading drafts of each row that equal the drawn tokens, up to its limit."""
    allowed = jnp.arange(drafts.shape[1])[None, :] < limits[:, None]
    agree = (drafts == draws[:, :-1]) & allowed
    return jnp.cumprod(agree, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
