"""Batching, chunks, preemption, prefix reuse and overlap do not change the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket, PageGroup
from kit.engines import run, tiny_engine, tiny_limits, tokens
from kit.tiny_models import LIKE_OTHERS, NAMES, VOCAB_SIZE, WITH_STATE

PROMPT_LENGTHS = (1, 3, 4, 5, 17, 33, 60, 8, 21, 2)
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True),
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE - 2, 24).tolist()
    own = [rng.integers(0, VOCAB_SIZE - 2, length).tolist() for length in PROMPT_LENGTHS]
    # half of the prompts share a prefix, so that some of it is reused
    return [shared[: 8 + 2 * i] + one if i % 2 else one for i, one in enumerate(own)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    """The reference: one request at a time, without prefix reuse."""
    limits = tiny_limits(enable_prefix_caching=False)
    engine = tiny_engine(limits)
    return {
        name: tokens(run(engine, prompts(), params, together=False))
        for name, params in SAMPLING.items()
    }


VARIANTS = {
    "batched": tiny_limits(enable_prefix_caching=False),
    "prefix reuse": tiny_limits(),
    "chunks of 16": tiny_limits(max_num_batched_tokens=16),
    "chunks of 64": tiny_limits(max_num_batched_tokens=64),
    "preemption": tiny_limits(num_pages=22),
    "one slot": tiny_limits(max_num_seqs=1),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens_as_alone(
    alone: dict[str, list[list[list[int]]]], variant: str, sampling: str
) -> None:
    engine = tiny_engine(VARIANTS[variant])
    outputs = run(engine, prompts(), SAMPLING[sampling])
    assert tokens(outputs) == alone[sampling]
    assert engine.stats().num_late_compiles == 0


def test_without_overlap(alone: dict[str, list[list[list[int]]]]) -> None:
    engine = tiny_engine(overlap=False)
    assert tokens(run(engine, prompts(), SAMPLING["seeded"])) == alone["seeded"]


def test_the_variant_preemption_preempts() -> None:
    engine = tiny_engine(VARIANTS["preemption"])
    run(engine, prompts(), SAMPLING["greedy"])
    assert engine.stats().num_preemptions > 0


def test_second_round_reuses_the_prefix(alone: dict[str, list[list[list[int]]]]) -> None:
    engine = tiny_engine()
    first = run(engine, prompts(), SAMPLING["greedy"], together=False)
    second = run(engine, prompts(), SAMPLING["greedy"])
    assert tokens(first) == tokens(second) == alone["greedy"]
    for prompt, output in zip(prompts(), second, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize(
    "model_name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS))
        for name in NAMES
        if name not in ("llama", *WITH_STATE)  # with state: test_hybrid.py
    ],
)
def test_every_family_serves(model_name: str) -> None:
    """Together and from the pages of earlier requests as alone without prefix reuse."""
    # only two executables, to save compile time: one for a single row, one for rows together
    limits = replace(
        tiny_limits(max_num_seqs=2), buckets=(Bucket(1), Bucket(2, 32, 2, scores=True))
    )
    cold = tiny_engine(replace(limits, enable_prefix_caching=False), model_name=model_name)
    alone = run(cold, prompts(), SAMPLING["greedy"], together=False)
    assert not any(output.num_cached_tokens for output in alone)
    served = tiny_engine(limits, model_name=model_name)
    assert tokens(run(served, prompts(), SAMPLING["greedy"])) == tokens(alone)
    last = slice(-4, None)  # whose pages are all still there, also with two groups of layers
    again = run(served, prompts()[last], SAMPLING["greedy"])
    assert tokens(again) == tokens(alone[last])
    cached = [output.num_cached_tokens for output in again]
    if served.limits.groups == (PageGroup(),):
        assert cached == [(len(prompt) - 1) // 4 * 4 for prompt in prompts()[last]]
    assert any(cached)  # pages before a window have other tokens by now
