"""With invariant pins a request's tokens and logprobs have the same bits in any company."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start.build import plan_engine
from kit.invariance import SEEDED, SIZES, Answer, ask, different, engine, prompts
from kit.tiny_models import tiny_config
from pallas_kernels.harness.pins import NO_PINS
from pallas_kernels.native.library import MISSING, library

pytestmark = pytest.mark.skipif(library() is None, reason=MISSING)
EACH = pytest.mark.parametrize("name", SIZES)


def _write_config(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(tiny_config(name), default=dict))


@cache
def alone(name: str) -> list[Answer]:
    return ask(engine(name), prompts(), together=False)


@pytest.mark.parametrize("count", [2, 3, 8])
@EACH
def test_in_company(name: str, count: int) -> None:
    """The others have prompts of other lengths, so the steps have all kinds of buckets."""
    served, all_prompts = engine(name), prompts()
    groups = [all_prompts[i : i + count] for i in range(0, len(all_prompts), count)]
    found = [one for group in groups for one in ask(served, group)]
    assert different(found, alone(name)) == []


@EACH
def test_in_other_chunks(name: str) -> None:
    assert different(ask(engine(name, chunk=16), prompts()), alone(name)) == []


@EACH
def test_with_reused_pages(name: str) -> None:
    """Also of the answer, which decode rows have computed, and its next turn."""
    served = engine(name, reuses=True)
    assert different(ask(served, prompts(), together=False), alone(name)) == []
    again = ask(served, prompts())
    assert different(again, alone(name)) == []
    turns = [
        [*prompt, *answer.token_ids, 3, 4, 5]
        for prompt, answer in zip(prompts(), alone(name), strict=True)
    ]
    found = ask(served, turns)
    assert different(found, ask(engine(name), turns, together=False)) == []
    assert any(one.num_cached for one in again)
    assert any(one.num_cached for one in found)


@EACH
def test_preempted(name: str) -> None:
    """Tokens that were decoded are computed again as a prompt's."""
    pages = 13 if name == "mistral" else 24  # those before a window are given back
    served, long = engine(name, num_pages=pages), replace(SEEDED, max_tokens=60)
    cold = ask(engine(name), prompts(), long, together=False)
    assert different(ask(served, prompts(), long), cold) == []
    assert served.stats().num_preemptions > 1


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_logprobs_of_prompts(name: str) -> None:
    scored = replace(SEEDED, prompt_logprobs=2)
    cold = ask(engine(name), prompts(), scored, together=False)
    assert all(answer.of_prompt for answer in cold)
    assert different(ask(engine(name, chunk=16), prompts(), scored), cold) == []


def test_without_the_pins_bits_differ() -> None:
    """XLA's sums depend on the number of rows: with equal bits the other tests would say little."""
    cold = ask(engine("llama", NO_PINS), prompts(), together=False)
    assert different(ask(engine("llama", NO_PINS), prompts()), cold)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"kernels": "sample=xla"}, "batch_invariant chooses the kernels"),
        ("llama", {"dtype": "bfloat16"}, "the dtype is bfloat16, not float32"),
        ("llama", {"task": "embed"}, "vectors of embeddings are pooled by XLA"),
        ("deepseek_v2", {"kv_cache_dtype": "fp8"}, "pages have 8 bits"),
        ("mistral", {"page_size": 4}, "pages of 4 tokens before a window"),
        ("falcon_mamba", {}, "FalconMambaForCausalLM has .*, and chunks of it have other bits"),
        ("lfm2", {}, "Lfm2ForCausalLM has .*, and chunks of it have other bits"),
        ("hy_v4", {}, "HYV4ForCausalLM has several residual streams, and chunks"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    _write_config(tmp_path, name)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        batch_invariant=True,
        **settings,
    )
    with pytest.raises(ConfigError, match=message):
        plan_engine(config)


def test_a_kernel_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Heads of 8 components."""
    _write_config(tmp_path, "llama")
    plan = plan_engine(
        EngineConfig(
            model=str(tmp_path),
            load_format="dummy",
            skip_tokenizer_init=True,
            batch_invariant=True,
        )
    )
    with pytest.raises(ConfigError, match="head_dim 8 .*; leave out batch_invariant"):
        plan.program.trace(plan.program.limits.buckets[0].name)
