"""Distinct experts that steps read, counted from the choices that routers made of a run's tokens.

Owns: ``DistinctExperts``. Steps keep these choices to themselves. So the sequences of the timed run
go through ``forward``, which has the same routers and returns their choices as taps. It is compiled
for one length, since a mixture of 48 layers may take half a minute. Its attention holds all scores
of a sequence, 8.6 GB for 32 heads and 8,192 tokens: a longer prompt is counted up to that length.
XLA's experts copy weights (9.8 GB for Qwen3-30B-A3B), which may not fit: see ``--uncounted``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from bench.step import cases
from jaxinfer import LLM
from jaxinfer.models.base import forward
from jaxinfer.nn.decoder_config import ExpertsConfig


def mean_distinct(choices: np.ndarray) -> float:  # int[steps, layers, tokens, k]
    """Distinct experts of a layer and step, as a mean over both."""
    steps, layers = choices.shape[:2]
    flat = choices.reshape(steps * layers, -1)
    return float(np.mean([np.unique(one).size for one in flat]))


@dataclass(frozen=True)
class DistinctExperts:
    """Counts for the runs of one engine, each as fields of a row; none for a model without experts.

    ``distinct_experts`` is a mean over layers and steps, of the ``experts`` of a layer. ``length``
    is the number of tokens that ``forward`` is compiled for; 0: no row is counted.
    """

    llm: LLM
    length: int

    def decode(self, prompts: list[list[int]]) -> dict[str, Any]:
        """The count for decode steps of a batch, in each of which a sequence has one token."""
        if not self._layers:
            return {}
        sampling = msgspec.structs.replace(cases.GREEDY, max_tokens=1 + cases.DECODED)
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        texts = (
            [*prompt, *output.outputs[0].token_ids[:-1]]
            for prompt, output in zip(prompts, outputs, strict=True)
        )
        of_rows = np.stack([choices[:, -cases.DECODED :] for choices in self._choices(texts)])
        return self._fields(of_rows.transpose(2, 1, 0, 3))

    def prompt(self, prompt: list[int]) -> dict[str, Any]:
        """The count for the first ``length`` tokens of one prompt: more may read more experts."""
        if not self._layers:
            return {}
        return self._fields(np.stack(list(self._choices([prompt[: self.length]]))))

    def _fields(self, choices: np.ndarray) -> dict[str, Any]:  # int[steps, layers, tokens, k]
        count = next(iter(self._layers.values())).count
        return {"distinct_experts": round(mean_distinct(choices), 2), "experts": count}

    def _choices(self, texts: Iterable[list[int]]) -> Iterator[np.ndarray]:
        """The choices of each text's tokens, int32[layers, tokens, k]."""
        params = self.llm.model.params
        for ids in texts:
            padded = np.zeros(self.length, np.int32)  # no token sees those after it
            padded[: len(ids)] = ids
            yield np.asarray(self._forward(params, padded))[:, : len(ids)]

    @cached_property
    def _layers(self) -> dict[str, ExpertsConfig]:
        """The layers whose experts are counted, by the names of their choices."""
        layers = self.llm.model.config.experts.items() if self.length else ()
        return {f"layers.{i}.experts": experts for i, experts in layers}

    @cached_property
    def _forward(self) -> Callable[..., jax.Array]:
        model, taps = self.llm.model.model, tuple(self._layers)

        def choices(params: Any, token_ids: jax.Array) -> jax.Array:
            _, found = forward(model, params, token_ids, taps)
            return jnp.stack([found[name] for name in taps])

        return jax.jit(choices)


def share_of(fields: dict[str, Any]) -> float | None:
    """The measured share of experts, for a floor."""
    return fields["distinct_experts"] / fields["experts"] if fields else None
