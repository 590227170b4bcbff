"""Pages of 8 bits through the whole engine: what the engine does with requests changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import json, structs

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.run.page_contents import page_contents
from jaxinfer.models import forward
from jaxinfer.nn.mixers import attention
from kit.engines import engine_of, run, tiny_engine, tiny_executor, tiny_limits, tokens
from kit.tiny_models import FP8, LIKE_OTHERS, NAMES, VOCAB_SIZE, WITH_STATE, tiny_config, tiny_model
from pallas_kernels.lib.page_scales import rounded, values_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_linear", "glm_moe_dsa")
LENGTHS = (1, 3, 4, 5, 17, 33, 60, 8, 21, 2)


def prompts() -> list[list[int]]:
    """Half of the prompts share a prefix."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE - 2, 24).tolist()
    own = [rng.integers(0, VOCAB_SIZE - 2, length).tolist() for length in LENGTHS]
    return [shared[: 8 + 2 * i] + one if i % 2 else one for i, one in enumerate(own)]


VARIANTS = {
    "prefix reuse": tiny_limits(),
    "chunks of 16": tiny_limits(max_num_batched_tokens=16),
    "preemption": tiny_limits(num_pages=22),
}


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """One request at a time, without prefix reuse."""
    engine = tiny_engine(tiny_limits(enable_prefix_caching=False), model_name="llama/fp8")
    return tokens(run(engine, prompts(), GREEDY, together=False))


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens_as_alone(alone: list[list[int]], variant: str) -> None:
    engine = tiny_engine(VARIANTS[variant], model_name="llama/fp8")
    assert tokens(run(engine, prompts(), GREEDY)) == alone
    assert tokens(run(engine, prompts(), GREEDY)) == alone  # from the pages of the first round
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (variant == "preemption")
    assert stats.num_late_compiles == 0


def test_a_hit_has_the_bits_of_a_cold_prompt() -> None:
    """Pages and logits, where the rest of the prompt is the same chunk."""
    limits = tiny_limits(max_num_batched_tokens=16)
    whole = np.random.default_rng(5).integers(0, VOCAB_SIZE - 2, 80).tolist()
    last = SamplingParams(temperature=0.0, max_tokens=1)
    found = []
    for earlier in ([], [*whole[:64], 7, 8, 9]):
        executor = tiny_executor(limits, "llama/fp8")
        engine = engine_of(executor, limits)
        if earlier:
            run(engine, [earlier], last)
        (output,) = run(engine, [whole], last)
        assert output.num_cached_tokens == len(earlier) // 64 * 64
        found.append(np.asarray(executor.arrays.slots.drawn_from)[:-1])
    np.testing.assert_array_equal(*found)


def test_logprobs_are_those_of_rounded_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense form, which has no pages, is given the keys and values that pages would hold."""
    prompt, (model, params) = prompts()[6], tiny_model("llama/fp8")
    (output,) = run(tiny_engine(model_name="llama/fp8"), [prompt], SCORED)
    found = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
    dense = attention.dense_attention

    def of_pages(q: jax.Array, k: jax.Array, v: jax.Array, *others: Any) -> jax.Array:
        return dense(q, *(values_of(x) * s[..., None] for x, s in map(rounded, (k, v))), *others)

    def logprobs() -> np.ndarray:
        logits = forward(model, params, jnp.asarray(prompt))
        each = jax.nn.log_softmax(logits)[jnp.arange(len(prompt) - 1), jnp.asarray(prompt[1:])]
        return np.asarray(each)

    assert np.abs(logprobs() - found).max() > 0.1
    monkeypatch.setattr(attention, "dense_attention", of_pages)
    jax.clear_caches()  # traces without and with the other function
    try:
        np.testing.assert_allclose(logprobs(), found, atol=1e-3)
    finally:
        jax.clear_caches()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name != "gpt2"))
        for name in NAMES
        if name not in ("llama", *LATENT, *WITH_STATE, *LIKE_OTHERS)
    ],
)
def test_families(name: str) -> None:
    """Together and from the pages of earlier requests as alone without prefix reuse."""
    limits = structs.replace(
        tiny_limits(max_num_seqs=2), buckets=(Bucket(1), Bucket(2, 32, 2, scores=True))
    )
    cold = structs.replace(limits, enable_prefix_caching=False)
    alone = run(tiny_engine(cold, model_name=name + FP8), prompts(), GREEDY, together=False)
    served = tiny_engine(limits, model_name=name + FP8)
    for _ in range(2):
        assert tokens(run(served, prompts(), GREEDY)) == tokens(alone)


def test_entries_of_latents() -> None:
    """A latent of 16 components has one scale, and the rotated key has 16 bits."""
    entries = {entry.name: entry for entry in tiny_model("deepseek_v2/fp8")[0].state.arrays}
    assert {n: (e.shape, str(e.dtype)) for n, e in entries.items()} == {
        "latent": ((16,), "uint8"),
        "latent_scale": ((1,), "float32"),
        "rope": ((8,), "bfloat16"),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_families_with_latents(name: str) -> None:
    """As ``test_families``."""
    test_families(name)


@pytest.mark.parametrize("name", ["llama", "gemma4_all", "qwen3_5"])
def test_only_entries_of_keys_and_values_change(name: str) -> None:
    """A token takes a byte for each component and four for each scale; other state is the same."""
    plain, own = (tiny_model(one)[0].state for one in (name, name + FP8))
    assert own.groups == plain.groups and own.bytes_per_slot == plain.bytes_per_slot
    (before, after) = (
        [e for e, pool in zip(one.arrays, one.pools, strict=True) if pool is not None]
        for one in (plain, own)
    )
    assert sum(own.bytes_per_entry) == sum(e.shape[0] * (e.shape[1] + 4) for e in before)
    assert {(e.name, str(e.dtype)) for e in after} == {
        *(("k", "uint8"), ("v", "uint8")),
        *(("k_scale", "float32"), ("v_scale", "float32")),
    }


@pytest.mark.parametrize(
    ("name", "pages", "message"),
    [
        ("deepseek_v4", "fp8", "DeepseekV4ForCausalLM can keep its KV cache only in bfloat16"),
        ("deepseek_v4", "bfloat16", "DeepseekV4ForCausalLM can keep its KV cache only in float32"),
        ("falcon_h1", "fp8", "FalconH1ForCausalLM can keep its KV cache only in bfloat16"),
        ("mamba2", "fp8", "Mamba2ForCausalLM has no KV cache"),
    ],
)
def test_models_that_have_no_such_pages(
    name: str, pages: Literal["fp8", "bfloat16"], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(json.encode(tiny_config(name)))
    dtype = "bfloat16" if pages == "fp8" else "float32"
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        kv_cache_dtype=pages,
    )
    with pytest.raises(ConfigError) as caught:
        plan_engine(config)
    said = str(caught.value)
    assert said.startswith(f"kv_cache_dtype is {pages}, but {message}")
    assert said.endswith("; leave it out")


def test_devices_divide_scales_as_heads() -> None:
    model = tiny_model("llama/fp8")[0]
    for devices in (2, 4):  # two KV heads: each is on two of four devices
        arrays = replace(model, devices=devices).state.arrays
        assert {e.shape[0] for e in arrays} == {max(2, devices)}
        assert {e.nbytes for e in arrays if e.name == "k_scale"} == {4}
        assert {e.nbytes for e in arrays if e.name == "k"} == {8}


def test_contents_of_pages_are_numbers() -> None:
    """For ``jaxinfer replay``, which compares them: values times scales."""
    model = tiny_model("llama/fp8")[0]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 2, 8)), jnp.float32)
    bits, scales = rounded(x)
    state = tuple(scales if e.name.endswith("_scale") else bits for e in model.state.arrays)
    found = page_contents(model.state, state, [[2, 1]])
    assert {*found} == {f"layers.{i}.{n}" for i in range(2) for n in "kv"}
    expected = np.asarray(values_of(bits) * scales[..., None])[[2, 1]]
    for group, values in found.values():
        assert group == 0 and values.dtype.itemsize == 2
        np.testing.assert_allclose(values.astype(np.float32), expected, rtol=2**-8)
