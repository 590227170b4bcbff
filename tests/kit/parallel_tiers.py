"""Tiers of engines on several fake CPU devices: see ``kit.parallel``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.tiers import CostModel
from jaxinfer.engine.start import tiers

DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
RESTORES = CostModel(token_seconds=1.0)  # so that a prefix in a tier is always restored
SMALL = {"num_pages": 27, "kv_offloading_size": 0.02, "preemption": "offload"}


def conversations(llm: LLM) -> list[list[tuple[int, float]]]:
    """Tokens and their logprobs of two turns of some conversations, one request at a time."""
    prompts = [list(range(first, first + 70)) for first in (3, 53, 103, 153)]
    found = list[list[tuple[int, float]]]()
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            (output,) = llm.generate([{"prompt_token_ids": prompt}], DRAWN)
            answer = output.outputs[0]
            prompts[number] = [*prompt, *answer.token_ids[:5], 9]
            steps = zip(answer.token_ids, answer.logprobs or (), strict=True)
            found.append([(token, step[token].logprob) for token, step in steps])
    return found


def check_tiers(path: Path, settings: dict[str, Any], degrees: tuple[int, ...]) -> None:
    """With pages that are saved, evicted and restored a group of devices gives the bits that it
    gives with all pages on the devices.
    """
    for degree in degrees:
        given = {**settings, "tensor_parallel_size": degree}
        expected = conversations(LLM(str(path), **given))
        with patch.object(tiers, "fitted_costs", lambda executor, mover: RESTORES):
            llm = LLM(str(path), **(given | SMALL))
        found, stats = conversations(llm), llm._engine.stats().tiers
        assert found == expected, (path, degree)
        assert stats.num_restored > 10 and not stats.num_failed, stats
