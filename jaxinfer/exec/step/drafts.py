"""Drafts: tokens that a decode row proposes, and how many of them the model accepts.

Owns: ``Drafter`` and the rule of acceptance. A draw is a function of logits, seed and position
alone (``pallas_kernels.sample``), so a row of k + 1 tokens draws after each of them what k + 1
steps of one token would have drawn, as long as the drafts before are what was drawn. Whatever a
drafter proposes, the tokens are those of decoding without it; no rejection sampler is needed.
(Leviathan et al., arXiv 2211.17192, accept a draft by chance instead, which keeps the distribution
only.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

NO_TOKEN = -1  # behind the last accepted token of a row


@dataclass(frozen=True)
class Drafter:
    """Proposes ``count`` tokens a row: ``propose(history, lens)`` of ``history`` int32[D, L], the
    tokens of each sequence, and ``lens`` int32[D], how many there are, returns int32[D, count]. It
    is traced into the step.
    """

    count: int
    propose: Callable[[jax.Array, jax.Array], jax.Array]


def num_accepted(
    drafts: jax.Array,  # int32[D, Q - 1]
    draws: jax.Array,  # int32[D, Q]: drawn after each token of the row
    most: jax.Array,  # int32[D]
) -> jax.Array:  # int32[D]
    """How many drafts of each row equal the tokens drawn in their place, up to the first miss."""
    allowed = jnp.arange(drafts.shape[1])[None, :] < most[:, None]
    agree = (drafts == draws[:, :-1]) & allowed
    return jnp.cumprod(agree, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
