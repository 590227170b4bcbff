"""Kimi Linear from files: the names of the published one, blocks of fp8, int4 while it loads, bad
configs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.models.base import forward
from jaxinfer.models.registry import build_model
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.save import ParamsCheckpoint
from kit.checkpoints import random_hf_tensors, write_hf_folder
from kit.memory_checkpoint import InMemory
from kit.tiny_models import tiny_config
from weights.test_experts import Typed, params_of
from weights.test_latent import FP8

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
NAME = "kimi-linear-48b-a3b-instruct"
SMALL = {  # each size another one; the delta rule's are in a section of their own
    "vocab_size": 80,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_experts": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
}
HEADS, WIDTH = 3, 8  # of the delta rule
NEVER_QUANTISED = re.compile(r".*\.(b_proj|[fg]_[ab]_proj|kv_b_proj|gate)\.weight")


def small_config() -> dict[str, Any]:
    """The published config with other sizes."""
    section = {**PUBLISHED[NAME]["linear_attn_config"], "num_heads": HEADS, "head_dim": WIDTH}
    return {**PUBLISHED[NAME], **SMALL, "linear_attn_config": section}


def published_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in the index of the file, written down from the published ones."""
    d, v = config["hidden_size"], config["vocab_size"]
    yield from (("model.embed_tokens.weight", (v, d)), ("model.norm.weight", (d,)))
    yield "lm_head.weight", (v, d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (d,)
        is_full = i + 1 in config["linear_attn_config"]["full_attn_layers"]
        mixer = attention(config) if is_full else delta(config)
        yield from ((f"{layer}self_attn.{name}", shape) for name, shape in mixer)
        yield from ((layer + name, shape) for name, shape in network(config, i))


def attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, n, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    yield "q_proj.weight", (n * (nope + rope), d)
    yield "kv_a_proj_with_mqa.weight", (rank + rope, d)
    yield "kv_a_layernorm.weight", (rank,)
    yield "kv_b_proj.weight", (n * (nope + value), rank)
    yield "o_proj.weight", (d, n * value)


def delta(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, channels = config["hidden_size"], HEADS * WIDTH
    for name in "qkv":
        yield f"{name}_proj.weight", (channels, d)
        yield f"{name}_conv1d.weight", (channels, 1, 4)
    for name in "fg":
        yield f"{name}_a_proj.weight", (WIDTH, d)
        yield f"{name}_b_proj.weight", (channels, WIDTH)
    yield from (("b_proj.weight", (HEADS, d)), ("o_proj.weight", (d, channels)))
    yield from (("A_log", (1, 1, HEADS, 1)), ("dt_bias", (channels,)), ("o_norm.weight", (WIDTH,)))


def network(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, f, e = (config[k] for k in ("hidden_size", "moe_intermediate_size", "num_experts"))

    def gated(start: str, names: tuple[str, ...], f: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in zip(names, ((f, d), (f, d), (d, f)), strict=True):
            yield f"{start}{name}.weight", shape

    dense = ("gate_proj", "up_proj", "down_proj")
    if layer == 0:
        yield from gated("mlp.", dense, config["intermediate_size"])
        return
    moe = "block_sparse_moe."
    yield from ((f"{moe}gate.weight", (e, d)), (f"{moe}gate.e_score_correction_bias", (e,)))
    yield from gated(f"{moe}shared_experts.", dense, f)
    for expert in range(e):
        yield from gated(f"{moe}experts.{expert}.", ("w1", "w3", "w2"), f)


def test_every_tensor_of_the_published_index_is_read_once() -> None:
    config = small_config()
    model = build_model(config, "bfloat16")
    files = Typed({n: np.zeros(s, ml_dtypes.bfloat16) for n, s in published_tensors(config)})
    params_of(model, files)
    assert len(files.tensors) == 1_773  # 20,493 with 256 experts
    assert set(files.reads) == set(files.tensors) and set(files.reads.values()) == {1}


def test_saved_tensors_are_those_that_were_loaded() -> None:
    model = build_model(tiny_config("kimi_linear"), "float32")
    tensors = random_hf_tensors(model)
    _, params = params_of(model, InMemory(tensors))
    saved = ParamsCheckpoint(model, params)
    assert set(saved.tensors) == set(tensors)
    for one, tensor in tensors.items():
        np.testing.assert_array_equal(saved.read(one), tensor, err_msg=one)


def two_layers() -> dict[str, Any]:
    """A config whose matrices are whole blocks of 128."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    wide |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 96}
    section = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 64}
    section |= {"short_conv_kernel_size": 4}
    few = {"num_hidden_layers": 2, "num_experts": 3, "num_experts_per_token": 2}
    return {**tiny_config("kimi_linear"), **wide, **few, "linear_attn_config": section}


def test_blocks_of_fp8_are_kept() -> None:
    model, rng = build_model(two_layers(), "float32"), np.random.default_rng(0)
    floats, stored = random_hf_tensors(model), dict[str, np.ndarray]()
    for name, tensor in floats.items():
        outside = name in ("lm_head.weight", "model.embed_tokens.weight")
        if tensor.ndim != 2 or outside or NEVER_QUANTISED.fullmatch(name):
            stored[name] = tensor
            continue
        values = tensor.astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, [size // 128 for size in tensor.shape]).astype(np.float32)
        stored |= {name: values, f"{name}_scale_inv": scales}
        floats[name] = values.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))
    scheme = quantization_scheme({"quantization_config": FP8})
    assert scheme is not None
    kept, params = params_of(model, QuantisedCheckpoint(Typed(stored), scheme))
    forms = {str(form) for _, form in kept.forms}
    assert forms == {"fp8 128x128", "fp8 per row"}  # of one block of inputs
    names = {name.rsplit(".", 2)[1] for name, _ in kept.forms}
    assert names >= {"q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "w1", "w2", "w3"}
    _, expected = params_of(model, InMemory(floats))
    ids = jnp.arange(40)
    logits = forward(kept, params, ids)
    np.testing.assert_allclose(logits, forward(model, expected, ids), atol=2e-4, rtol=2e-4)


INT4 = {"quantization": "int4", "cpu_weights": "quantised", "skip_tokenizer_init": True}
INT4 |= {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 128}


def test_int4_while_it_loads(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", two_layers())
    plan = plan_engine(EngineConfig(model=str(folder), load_format="dummy", **INT4))
    forms = dict(plan.program.model.forms)
    assert {str(form).split()[0] for form in forms.values()} == {"int4"}
    names = {name.rsplit(".", 2)[1] for name in forms}
    assert names >= {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}
    assert not any(NEVER_QUANTISED.fullmatch(name) for name in forms)


def test_int4_is_served(tmp_path: Path) -> None:
    """The drawn tokens are the best ones of the dense form, or nearly: products with quantised
    weights round their inputs.
    """
    config = two_layers()
    weights = random_hf_tensors(build_model(config, "float32"))
    folder = write_hf_folder(tmp_path / "model", config, weights)
    llm = LLM(str(folder), cache_dir=str(tmp_path / "cache"), **INT4)
    prompt, greedy = list(range(70)), SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = np.asarray(llm.model.forward([*prompt, *tokens]))[len(prompt) - 1 : -1]
    drawn = logits[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(drawn, logits.max(axis=-1), atol=0.05 * float(logits.std()))


def section(**change: Any) -> dict[str, Any]:
    own = tiny_config("kimi_linear")["linear_attn_config"]
    return {"linear_attn_config": {**own, **change}}


LISTS = "must have each of the 3 layers, counted from 1, in one of its lists"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (section(kda_layers=[1]), LISTS),
        (section(kda_layers=[0, 2]), LISTS),
        (section(kda_layers=[1, 2]), LISTS),
        (section(kda_layers=[1, True]), LISTS),
        (section(kda_layers="1"), LISTS),
        (section(kda_layers=[1, 3], full_attn_layers=[2] * 10**5), LISTS),
        (section(num_heads=0), "'linear_attn_config.num_heads' must be a positive integer, got 0"),
        (section(head_dim=None), "'linear_attn_config.head_dim' is missing"),
        (section(gate_lower_bound=-5.0), "has the key 'gate_lower_bound', which KimiLinear"),
        ({"linear_attn_config": [1]}, "'linear_attn_config' must be an object, got [1]"),
        (
            {"layer_types": ["linear_attention", "full_attention", "mamba"]},
            "'layer_types' must hold 'linear_attention' or 'full_attention' for each of the 3",
        ),
        ({"layer_types": ["full_attention"] * 2}, "for each of the 3 layers"),
        (
            {"layer_types": ["full_attention", *["linear_attention"] * 2]},
            "'layer_types' differs from the lists of 'linear_attn_config'",
        ),
        ({"mlp_layer_types": ["dense"] * 4}, "'mlp_layer_types' must hold 'dense' or 'sparse'"),
        ({"mla_use_nope": False}, "'mla_use_nope' is False, and this family supports only True"),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling' is"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is 'softmax'"),
        ({"num_experts_per_token": 8}, "'num_experts_per_token' is 8, and a token can choose"),
        ({"num_expert_group": 2}, "'num_expert_group' is 2, and 7 experts cannot be divided"),
        ({"hidden_act": "situ"}, "'hidden_act' is 'situ'"),
        ({"model_max_length": "long"}, "'model_max_length' must be a positive integer"),
        ({"attn_res_block_size": 3}, "'attn_res_block_size' is 3, which KimiLinearForCausalLM"),
    ],
)
def test_bad_configs_are_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_model({**tiny_config("kimi_linear"), **change}, "float32")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_transformers_keys_are_those_of_published_files() -> None:
    """It writes the kinds of layers and the sizes of the delta rule under names of its own."""
    published, own = small_config(), small_config()
    lists = own.pop("linear_attn_config")
    own |= {"linear_num_heads": HEADS, "linear_head_dim": WIDTH, "linear_conv_kernel_dim": 4}
    kinds = ("linear_attention", "full_attention")
    own["layer_types"] = [kinds[i in lists["full_attn_layers"]] for i in range(1, 28)]
    own["mlp_layer_types"] = ["dense", *["sparse"] * 26]
    del own["first_k_dense_replace"]
    assert build_model(own, "float32") == build_model(published, "float32")


def test_a_share_has_a_part_of_the_heads() -> None:
    mixer = build_model(two_layers(), "float32").config.layers[0].mixer
    assert isinstance(mixer, DeltaConfig)
    half = mixer.share(2)
    assert half == replace(mixer, num_k_heads=1, num_v_heads=1) and half.decays == 64
    assert (
        mixer.words()
        == "the gated delta rule by channel, 2 key heads of 64 and 2 value heads of 64"
    )
