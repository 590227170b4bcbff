"""Scores an engine's tokens under ``models.forward``, in float32 and in the engine's own dtype."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.shapes import cdiv
from jaxinfer.models.base import Model, Params, forward
from jaxinfer.models.registry import build_model
from jaxinfer.weights.sources import ModelSource

PAD = 128  # every sequence is padded to one multiple of this, so that there is one compilation


class Answer(NamedTuple):
    """One sequence as an engine continued it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # of ``tokens``, if they were requested


class Scores(NamedTuple):
    """Logprobs of an answer's tokens under the reference and the floor; all float32[tokens]."""

    best: np.ndarray  # the reference's logprob of its best token
    chosen: np.ndarray  # the reference's logprob of the answer's token
    floor_best: np.ndarray  # the reference's logprob of the floor's best token
    floor_chosen: np.ndarray  # the floor's logprob of the answer's token


class Scorer:
    """Scores answers under both forwards; each distinct sequence once."""

    def __init__(self, source: ModelSource, dtype: str, params: Params, longest: int) -> None:
        self._floor = build_model(source.hf_config, dtype)
        self._reference = build_model(source.hf_config, "float32")
        self._params, self._length = params, cdiv(longest, PAD) * PAD
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Scores] = {}

    @cached_property
    def _params32(self) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self._params)

    def __call__(self, answer: Answer) -> Scores:
        """See ``Scores``."""
        key = (answer.prompt, answer.tokens)
        if key not in self._known:
            self._known[key] = self._score(answer.prompt + answer.tokens, len(answer.tokens))
        return self._known[key]

    def _score(self, sequence: tuple[int, ...], count: int) -> Scores:
        ids = np.zeros(self._length + 1, np.int32)
        ids[: len(sequence)] = sequence
        token_ids, following = ids[:-1], ids[1:]
        choice, _, (floor_chosen,) = logprobs(self._floor, self._params, token_ids, following[None])
        candidates = np.stack([following, np.asarray(choice)])
        with jax.default_matmul_precision("highest"):
            _, best, (chosen, floor_best) = logprobs(
                self._reference, self._params32, token_ids, candidates
            )
        # the positions that predict the answer's tokens
        answered = slice(len(sequence) - count - 1, len(sequence) - 1)
        return Scores(*(np.asarray(x)[answered] for x in (best, chosen, floor_best, floor_chosen)))


@jax.jit(static_argnums=0)
def logprobs(
    model: Model,
    params: Params,
    token_ids: jax.Array,  # int32[T]
    candidates: jax.Array,  # int32[C, T]
) -> tuple[jax.Array, jax.Array, jax.Array]:  # int32[T], float32[T], float32[C, T]
    """At each position the best next token, its logprob, and those of the candidates."""
    table = jax.nn.log_softmax(forward(model, params, token_ids))
    best = jnp.argmax(table, axis=-1)
    of = jax.vmap(lambda ids: jnp.take_along_axis(table, ids[:, None], axis=-1)[:, 0])
    return best, jnp.max(table, axis=-1), of(candidates)
