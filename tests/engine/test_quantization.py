"""Which matrices of a model an engine keeps quantised, by its files and by ``quantization``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import NoProgress
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.models.base import Model, forward
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.load import load_params
from kit import published_formats as kit
from kit.checkpoints import random_hf_tensors, tiny_qwen3_config, write_hf_folder
from kit.memory_checkpoint import InMemory, source_of
from pallas_kernels.native.library import MISSING, variants


def plan(folder: Path, **settings: object) -> EnginePlan:
    """The plan of an engine; reads no weights."""
    small = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64}
    settings = {"cpu_weights": "quantised", "skip_tokenizer_init": True, **small, **settings}
    return plan_engine(EngineConfig(model=str(folder), **settings))  # type: ignore[arg-type]


def forms(model: Model) -> set[str]:
    return {str(form) for _, form in model.forms}


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    """A folder of float32 weights."""
    config = tiny_qwen3_config()
    folder = write_hf_folder(tmp_path / "floats", config)
    model = plan(folder, load_format="dummy").program.model
    return write_hf_folder(folder, config, random_hf_tensors(model))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_published_files_and_random_weights_like_them(tmp_path: Path, load_format: str) -> None:
    config, tensors, matrices = kit.published("Qwen3-AWQ")
    folder = kit.write_published(tmp_path, config, tensors)
    model = plan(folder, load_format=load_format).program.model
    assert dict(model.forms).keys() == matrices.keys()
    assert plan(folder, load_format=load_format, cpu_weights="float32").program.model.forms == ()
    plan(folder, quantization="awq_marlin")
    with pytest.raises(ConfigError, match="is quantised already, by awq; leave it out"):
        plan(folder, quantization="int4")


@pytest.mark.parametrize(
    ("quantization", "form"),
    [("int4", "int4 per row"), ("int8", "int8 per row"), ("fp8", "fp8 per row")],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_floats_are_quantised_while_they_load(
    floats: Path, load_format: str, quantization: str, form: str
) -> None:
    made = plan(floats, load_format=load_format, quantization=quantization)
    assert forms(made.program.model) >= {form}
    names = {name.rsplit(".", 2)[1] for name, _ in made.program.model.forms}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    kernel = f"{quantization}_lanes" if variants() else quantization
    assert kernel in {path.rsplit("/", 1)[-1] for path in made.program.model.arrays}


@pytest.mark.skipif(not variants(), reason=MISSING)
@pytest.mark.parametrize(("block", "kept"), [([16, 32], True), ([8, 32], False)])
def test_by_default_a_cpu_keeps_what_its_kernel_can_multiply(
    floats: Path, block: list[int], kept: bool
) -> None:
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (floats / "config.json").write_text(json.dumps(config))
    made = plan(floats, load_format="dummy", cpu_weights="auto").program.model
    assert forms(made) == ({f"fp8 {block[0]}x{block[1]}"} if kept else set())
    every = plan(floats, load_format="dummy", cpu_weights="quantised").program.model
    assert forms(every) == {f"fp8 {block[0]}x{block[1]}"}


def test_a_model_that_is_quantised_on_loading_is_served(tmp_path: Path) -> None:
    """Its answers are those of the rounded weights, and no converted copy of them is written."""
    config = tiny_qwen3_config()
    model = build_model(config, "float32")
    weights = random_hf_tensors(model)
    # Larger ones: with the usual ones all logits are nearly equal, whatever the rounding.
    weights = {
        name: w * 8 if "proj" in name or "embed" in name else w for name, w in weights.items()
    }
    folder = write_hf_folder(tmp_path / "model", config, weights)
    rounded = dict(weights)
    for name in (name for name in weights if name.endswith("_proj.weight")):
        scale = np.abs(weights[name]).max(axis=1, keepdims=True) / np.float32(127)
        rounded[name] = np.rint(weights[name] / scale) * scale
    cache = tmp_path / "cache"
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    settings = {"cache_dir": str(cache), "skip_tokenizer_init": True, **sizes}
    llm = LLM(str(folder), quantization="int8", cpu_weights="quantised", **settings)
    prompt = [(7 * i * i + 1) % 96 for i in range(20)]
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
    answer = output.outputs[0]
    assert {path.name for path in cache.iterdir()} == {"executables", "uses"}
    assert len({*answer.token_ids}) > 1
    compiled = jax.jit(forward, static_argnums=0)

    def logprobs(tensors: Mapping[str, np.ndarray]) -> np.ndarray:  # float32[10, V]
        placed = {"placement": default_placement(), "cache_dir": cache}
        source = source_of(InMemory(tensors))
        params = load_params(model, source, **placed, seed=0, progress=NoProgress())
        logits = compiled(model, params, jnp.asarray([*prompt, *answer.token_ids]))
        return np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 : -1]))

    expected, without = logprobs(rounded), logprobs(weights)
    assert expected.argmax(axis=1).tolist() == list(answer.token_ids)
    steps = zip(answer.logprobs or (), answer.token_ids, strict=True)
    served = np.array([step[token].logprob for step, token in steps])
    np.testing.assert_allclose(served, expected.max(axis=1), atol=1e-4)
    assert np.abs(served - without.max(axis=1)).max() > 1e-3


def test_a_method_that_is_not_that_of_the_files(floats: Path) -> None:
    with pytest.raises(ConfigError, match="is not quantised; use fp8, int8, int4 to quantise it"):
        plan(floats, quantization="awq")


def test_a_config_that_is_not_supported(floats: Path) -> None:
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (floats / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quant_method' is 'bitsandbytes', which is not"):
        plan(floats)
