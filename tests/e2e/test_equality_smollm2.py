"""64 requests on real weights give the same tokens in every schedule. Takes minutes: nightly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams

NUM_REQUESTS = 64
MAX_TOKENS = 24
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, seed=1234, max_tokens=MAX_TOKENS, ignore_eos=True
    ),
}
BASE: dict[str, Any] = {
    "cpu_weights": "float32",
    "max_num_seqs": 64,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**30,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "together": {"enable_prefix_caching": False},
    "prefix reuse": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "preemption": {"num_pages": 200},
    "no overlap": {"overlap": False},
}

pytestmark = pytest.mark.nightly


def prompts() -> list[list[int]]:
    """Lengths from 1 to about 600 tokens; every third begins with the same 100 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 40000, 100).tolist()
    lengths = np.exp(rng.uniform(0, np.log(500), NUM_REQUESTS)).astype(int)
    own = [rng.integers(100, 40000, length).tolist() for length in lengths]
    return [shared + one if i % 3 == 0 else one for i, one in enumerate(own)]


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts(), params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    llm = LLM(**BASE, enable_prefix_caching=False)
    return {
        name: [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts()]
        for name, params in SAMPLING.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens(alone: dict[str, list[list[int]]], variant: str) -> None:
    llm = LLM(**{**BASE, **VARIANTS[variant]})
    for name, params in SAMPLING.items():
        different = [i for i, a in enumerate(answers(llm, params)) if a != alone[name][i]]
        assert not different, f"{variant}, {name}: requests {different} differ"
    stats = llm.stats()
    assert stats.num_late_compiles == 0
    assert (stats.num_preemptions > 0) == (variant == "preemption")
    assert (stats.num_cached_tokens > 0) == (variant != "together")
