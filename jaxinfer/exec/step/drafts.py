"""Drafts: tokens proposed for decode rows, and the number of them that the model accepts.

A draw is a function of logits, seed and position alone (``pallas_kernels.sample``). So as long as
the drafts of a row of k + 1 tokens equal the draws, its draws equal those of k + 1 steps of one
token. A drafter never changes the tokens, and no rejection sampler is needed. (Leviathan et al.,
arXiv 2211.17192, accept drafts at random, which preserves only the distribution.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Params
from jaxinfer.nn.state import LayerArrays, LayerState

NO_TOKEN = -1  # follows the last accepted token of a row


class DraftContext(NamedTuple):
    """The rows of a step at its end, when the number of accepted drafts of each is known."""

    slots: jax.Array  # int32[B]; the last slot for padding
    begins: jax.Array  # int32[B]: the position of the first token that the step computed
    lens: jax.Array  # int32[B]: known tokens, those that the step drew included
    samples: jax.Array  # bool[B]: whether the row drew; not, if more chunks of its prompt follow


@dataclass(frozen=True)
class Drafter:
    """Proposes ``count`` tokens that follow each row, at the end of a step and as a part of it.

    ``propose(params, state, slots, hidden, ctx)`` returns the drafts int32[B, count] and the new
    state. ``hidden`` [B, D] is the model's state of each row's last token, from which its last
    token was drawn; ``slots.token_ids[ctx.slots]`` are the tokens of each row. ``params`` are
    arguments of the step, not constants. The state has an entry for each slot; a slot has that of
    an earlier sequence until a row ``begins`` at 0, and also after a reused prefix, which costs at
    most drafts that are refused. ``name`` and the source of ``propose`` identify the drafter of
    saved executables, so the function must not depend on other values.
    """

    name: str
    count: int
    propose: Callable[
        [Params, LayerArrays, SlotState, jax.Array, DraftContext], tuple[jax.Array, LayerArrays]
    ]
    params: Mapping[str, Any] = field(default=MappingProxyType({}), compare=False, repr=False)
    state: LayerState = LayerState()

    def __post_init__(self) -> None:
        """Check that the state is one that slots can hold."""
        assert not self.state.paged, "a drafter's state has an entry for each sequence"

    def weights(self) -> list[Any]:
        """The parameters as arguments of a step."""
        return jax.tree.leaves(dict(self.params))

    def params_of(self, weights: tuple[jax.Array, ...]) -> Params:
        """The parameters, from the arguments of a step."""
        return jax.tree.unflatten(jax.tree.structure(dict(self.params)), weights)


def num_accepted(
    drafts: jax.Array,  # int32[D, Q - 1]
    draws: jax.Array,  # int32[D, Q]: drawn after each token of the row
    limits: jax.Array,  # int32[D]
) -> jax.Array:  # int32[D]
    """The number of leading drafts of each row that equal the drawn tokens, up to its limit."""
    allowed = jnp.arange(drafts.shape[1])[None, :] < limits[:, None]
    agree = (drafts == draws[:, :-1]) & allowed
    return jnp.cumprod(agree, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
