"""The golden greedy answers of SmolLM2, as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "smollm2_greedy.safetensors"


class Golden(NamedTuple):
    """Greedy answers of transformers on the same dequantised weights."""

    prompts: list[list[int]]
    tokens: np.ndarray  # int[30, 64]
    margin: np.ndarray  # float[30, 64]: logit distance between the first and the second choice
    topk_steps: np.ndarray  # int[3]
    topk_ids: np.ndarray  # int[30, 3, 20]
    topk_logprobs: np.ndarray  # float[30, 3, 20]


def read_golden() -> Golden:
    """Read the committed file."""
    data = load_file(GOLDEN)
    ends = np.cumsum(data["prompt_lens"])[:-1]
    prompts = [part.tolist() for part in np.split(data["prompt_tokens"], ends)]
    names = ("decode_tokens", "margin", "topk_steps", "topk_ids", "topk_logprobs")
    return Golden(prompts, *(data[name] for name in names))
