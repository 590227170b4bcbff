"""The prompts of ``bench.accuracy``, of many lengths, and the settings of an engine for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.core.shapes import cdiv
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights.sources import ModelSource


@dataclass(frozen=True)
class Workload:
    """The sizes; prompts from shortest to longest, answers of ``tokens`` on average."""

    prompts: int = 16
    shortest: int = 5
    longest: int = 600
    tokens: int = 64
    chunk: int = 256  # so that long prompts take several steps, together with decoding rows

    def prompt_lengths(self) -> list[int]:
        """The prompts' lengths, evenly spread by ratio."""
        return np.geomspace(self.shortest, self.longest, self.prompts).astype(int).tolist()

    def answer_lengths(self) -> list[int]:
        """The answers' lengths, falling, so that all decode buckets run as rows end."""
        spread = np.linspace(1.5 * self.tokens, 0.5 * self.tokens, self.prompts)
        return np.rint(spread).astype(int).tolist()

    def lengths(self) -> list[int]:
        """The lengths of prompt and answer together."""
        return [p + a for p, a in zip(self.prompt_lengths(), self.answer_lengths(), strict=True)]

    def engine_settings(self, page_size: int) -> dict[str, Any]:
        """The settings of an engine that holds just these sequences."""
        return {
            "max_num_seqs": self.prompts,
            "max_num_batched_tokens": self.chunk,
            "max_model_len": max(self.lengths()),
            "num_pages": 1 + sum(cdiv(length, page_size) + 1 for length in self.lengths()),
            "enable_prefix_caching": False,  # the second run must compute the same as the first
        }


def make_prompts(
    source: ModelSource, text: Path | None, work: Workload, seed: int
) -> list[list[int]]:
    """Pieces of the text, or random ids."""
    rng = np.random.default_rng(seed)
    lengths = work.prompt_lengths()
    if text is None:
        return [rng.integers(source.hf_config["vocab_size"], size=n).tolist() for n in lengths]
    ids = load_tokenizer(source.tokenizer_spec()).encode(text.read_text(), add_special_tokens=False)
    if len(ids) <= work.longest:
        raise SystemExit(f"{text} has {len(ids)} tokens, and a prompt needs {work.longest}")
    starts = [int(rng.integers(len(ids) - n)) for n in lengths]
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]
