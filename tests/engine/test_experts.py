"""A mixture of experts from files is served; settings of experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start import build
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.compile import sizes
from jaxinfer.exec.compile.mixed_tokens import free_prompt_tokens
from jaxinfer.exec.run import device_memory
from jaxinfer.models.registry import build_model
from jaxinfer.nn.decoder_config import ExpertsConfig
from kit.checkpoints import write_hf_folder
from kit.quantised_models import write_gpt_oss
from kit.tiny_models import VOCAB_SIZE, tiny_config

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 96}
SIZES |= {"skip_tokenizer_init": True}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
# Two pages and 2 tokens: when they have been computed, the window of 7 still needs the second page.
PROMPTS = [[(7 * i * i + first) % VOCAB_SIZE for i in range(n)] for first, n in ((1, 34), (5, 3))]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small gpt-oss in MXFP4."""
    return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss"), shards=2)


def answers(llm: LLM, *, cached: int = 0) -> list[tuple[int, ...]]:
    """The tokens; ``cached`` ones of the first prompt are reused, and none of the short one."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [cached, 0]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_mxfp4_is_served_as_it_is_and_dequantised(gpt_oss: Path, tmp_path: Path) -> None:
    settings = {**SIZES, "cache_dir": str(tmp_path)}
    kept = LLM(str(gpt_oss), **settings)
    first = answers(kept)
    assert len({*first[0]}) > 1
    assert answers(kept, cached=32) == first  # the second time from the pages of the first
    cold = LLM(str(gpt_oss), cpu_weights="float32", enable_prefix_caching=False, **settings)
    assert [answers(cold) for _ in range(2)] == [first] * 2


def test_dummy_routing_is_for_random_weights_of_experts(gpt_oss: Path, tmp_path: Path) -> None:
    plan = plan_engine(
        EngineConfig(model=str(gpt_oss), load_format="dummy", dummy_routing="uniform", **SIZES)
    )
    ffn = plan.program.model.config.layers[0].ffn
    assert isinstance(ffn, ExpertsConfig) and ffn.dummy_routing == "uniform"
    assert ("fp4", 32) in {(form.kind, form.group or 32) for _, form in plan.program.model.forms}
    with pytest.raises(ConfigError, match="has weights whose routers choose; use it with load_f"):
        plan_engine(EngineConfig(model=str(gpt_oss), dummy_routing="uniform", **SIZES))
    dense = write_hf_folder(tmp_path, tiny_config("mistral"))
    with pytest.raises(ConfigError, match="'uniform', but MistralForCausalLM has no experts"):
        plan_engine(
            EngineConfig(model=str(dense), load_format="dummy", dummy_routing="uniform", **SIZES)
        )


def test_whole_experts_are_for_models_with_experts(gpt_oss: Path, tmp_path: Path) -> None:
    """As in vLLM an error, also on one device; there, a model's experts are whole anyway."""
    settings: dict[str, Any] = {**SIZES, "load_format": "dummy", "enable_expert_parallel": True}
    dense = write_hf_folder(tmp_path, tiny_config("mistral"))
    message = "enable_expert_parallel is on, but MistralForCausalLM has no experts; leave it out"
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model=str(dense), **settings))
    assert plan_engine(EngineConfig(model=str(gpt_oss), **settings)).program.model.devices == 1


def test_prompt_tokens_beside_decode_rows_follow_from_the_experts() -> None:
    tokens = {
        name: free_prompt_tokens(build_model(PUBLISHED[name], "bfloat16"))
        for name in ("qwen3-30b-a3b", "mixtral-8x7b", "qwen3-4b")
    }
    assert tokens == {"qwen3-30b-a3b": 2048, "mixtral-8x7b": 512, "qwen3-4b": 0}


def test_prompt_tokens_beside_decode_rows_are_a_plans_default(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a model's experts take for free, no fewer than a GPU's default, no more than a
    step's prompt tokens, or the number that is set. A CPU has no default.
    """
    dense = write_hf_folder(tmp_path, tiny_config("mistral"))

    def planned(model: Path, **settings: Any) -> int | None:
        config = EngineConfig(model=str(model), load_format="dummy", **SIZES | settings)
        return plan_engine(config).config.max_num_mixed_tokens

    assert planned(gpt_oss) is None
    defaults = build.with_device_defaults

    def of_a_gpu(config: EngineConfig, platform: str) -> EngineConfig:
        given = config.max_num_mixed_tokens
        return replace(defaults(config, platform), max_num_mixed_tokens=given or 16)

    monkeypatch.setattr(build, "with_device_defaults", of_a_gpu)
    monkeypatch.setattr(
        sizes, "free_prompt_tokens", lambda model: 32 if "GptOss" in model.architecture else 0
    )
    assert planned(gpt_oss) == 32
    assert planned(gpt_oss, max_num_batched_tokens=24) == 24
    assert planned(gpt_oss, max_num_mixed_tokens=8) == 8
    assert planned(dense) == 16


def test_weights_beyond_the_memory_of_a_machine_are_refused(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_memory.os, "sysconf", lambda name: 16)  # 256 bytes
    for made in (LLM, jaxinfer.load):
        with pytest.raises(
            ConfigError, match=r"weights take .* and this machine has .* of memory; us"
        ):
            made(str(gpt_oss), cache_dir=str(tmp_path), **SIZES)
