"""Greedy tokens of the dense form of tiny models, and a check that an engine draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.models import forward
from kit.engines import run
from kit.tiny_models import VOCAB_SIZE, tiny_model


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Prompts of one seed share a beginning."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 2, length).tolist()


def dense_next(name: str, tokens: Sequence[int], length: int) -> list[int]:
    """The likeliest token after each of these, by the dense form over ``length`` with padding.

    An answer is greedy if each of its tokens is the likeliest one after those before it, which one
    pass over prompt and answer shows.
    """
    _, params = tiny_model(name)
    ids = np.zeros(length, np.int32)
    ids[: len(tokens)] = tokens
    return np.asarray(_best(name)(params, ids))[: len(tokens)].tolist()


@cache
def _best(name: str) -> jax.stages.Wrapped:
    model, _ = tiny_model(name)
    return jax.jit(lambda params, ids: jnp.argmax(forward(model, params, ids), axis=-1))


def check_tokens(
    name: str, served: Engine, prompts: Sequence[list[int]], params: SamplingParams, *lengths: int
) -> list[int]:
    """The tokens are those of the dense form; returns how many of each prompt were reused.

    The dense form is traced over the first of ``lengths`` that holds a prompt and its answer.
    """
    outputs, count = run(served, prompts, params), params.max_tokens or 0
    for prompt, output in zip(prompts, outputs, strict=True):
        length = next(one for one in lengths if len(prompt) + count <= one)
        found = list(output.outputs[0].token_ids)
        assert len(found) == count
        expected = dense_next(name, [*prompt, *found], length)[len(prompt) - 1 : -1]
        assert found == expected, len(prompt)
    return [output.num_cached_tokens for output in outputs]
