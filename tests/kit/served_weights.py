"""A tiny model for tests of weights that change while they are served, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPT = list(range(3, 40))  # more than four pages


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A folder with a two-layer Llama, a tokenizer and a generation_config."""
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32"), seed))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return folder


def with_larger_down(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with a low-rank change of one matrix."""
    down = params["layers_0"]["down"]  # so that keys of the next layer change
    a, b = jax.random.normal(jax.random.key(3), (2, down.shape[0]))
    change = jnp.outer(a, b[: down.shape[1]])
    return {**params, "layers_0": {**params["layers_0"], "down": down + change}}


def greedy(model: LanguageModel, count: int = 6) -> tuple[list[int], list[float]]:
    """The greedy continuation of ``PROMPT`` by ``forward``, and the logprobs of its tokens."""
    ids, logprobs = list(PROMPT), list[float]()
    for _ in range(count):
        padded = ids + [0] * (len(PROMPT) + count - len(ids))
        row = jax.nn.log_softmax(model.forward(padded)[len(ids) - 1])
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(PROMPT) :], logprobs


def check_served(outputs: Any, model: LanguageModel, *, cached: int = 0) -> None:
    """A served answer to ``PROMPT`` is the one of ``forward``."""
    (output,) = outputs
    answer = output.outputs[0]
    tokens, logprobs = greedy(model)
    assert answer.token_ids == tokens
    served = [
        step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    np.testing.assert_allclose(served, logprobs, atol=1e-4)
    assert output.num_cached_tokens == cached
