"""DeepSeek and Kimi from files: the names of published ones, their forms, saving, bad configs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.models.base import Model, forward
from jaxinfer.models.registry import build_model
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.save import ParamsCheckpoint
from jaxinfer.weights.sources import resolve_source
from kit.checkpoints import random_hf_tensors, write_hf_folder
from kit.memory_checkpoint import InMemory
from kit.tiny_models import tiny_config, tiny_model
from weights.test_experts import Typed, params_of

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
INT4 = {  # of Kimi-K2-Thinking
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
}
GATED = ("gate_proj", "up_proj", "down_proj")
INDEXER = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
LINEAR = re.compile(r"((?<!weights)_proj|_mqa|\.wq_b|\.wk)\.weight$")
ROUTED = re.compile(r"mlp\.experts\.\d+\.")


def published_names(config: dict[str, Any]) -> Iterator[str]:
    """The matrices and vectors in the index of DeepSeek-V2-Lite or Kimi-K2."""
    queries = ["q_proj"] if config["q_lora_rank"] is None else ["q_a_proj", "q_b_proj"]
    attention = [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "kv_a_layernorm"]
    attention += [] if config["q_lora_rank"] is None else ["q_a_layernorm"]
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        yield from (f"{start}{name}_layernorm.weight" for name in ("input", "post_attention"))
        yield from (f"{start}self_attn.{name}.weight" for name in attention)
        if "index_topk" in config:
            yield from (f"{start}self_attn.indexer.{name}" for name in INDEXER)
        if layer < config["first_k_dense_replace"]:
            yield from (f"{start}mlp.{name}.weight" for name in GATED)
            continue
        yield f"{start}mlp.gate.weight"
        if "DeepseekV2ForCausalLM" not in config["architectures"]:
            yield f"{start}mlp.gate.e_score_correction_bias"
        yield from (f"{start}mlp.shared_experts.{name}.weight" for name in GATED)
        for expert in range(config["n_routed_experts"]):
            yield from (f"{start}mlp.experts.{expert}.{name}.weight" for name in GATED)


def stored(model: Model, names: list[str], form: str | None) -> Typed:
    """Small tensors of those names as published: zeros, with scales of 1."""
    shapes = {s.name: s.shape for spec in model.param_specs for s in spec.sources}
    made: dict[tuple[Any, ...], np.ndarray] = {}
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, shape: tuple[int, ...], dtype: Any, value: int = 0) -> None:
        key = (shape, np.dtype(dtype).name, value)
        tensors[name] = made.setdefault(key, np.full(shape, value, dtype))

    for name in names:
        shape, stem = shapes[name], name.removesuffix("weight")
        is_linear = LINEAR.search(name) is not None
        if form == "fp8" and is_linear:
            put(name, shape, ml_dtypes.float8_e4m3fn)
            put(f"{name}_scale_inv", tuple(-(-size // 128) for size in shape), np.float32, 1)
        elif form == "int4" and ROUTED.search(name):
            outputs, inputs = shape
            put(f"{stem}weight_packed", (outputs, inputs // 8), np.int32)
            put(f"{stem}weight_scale", (outputs, inputs // 32), ml_dtypes.bfloat16, 1)
            tensors[f"{stem}weight_shape"] = np.array(shape, np.int64)
        else:
            dtype = np.float32 if name.endswith("bias") else ml_dtypes.bfloat16
            put(name, shape, dtype)
    return Typed(tensors)


LITE = {"num_hidden_layers": 27, "n_routed_experts": 64, "num_experts_per_tok": 6}
KIMI = {"num_hidden_layers": 2, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1}
KIMI |= {"topk_group": 1, "n_shared_experts": 1}
# blocks of 128 x 128 of which the last of kv_a_proj_with_mqa is not whole, as in the published 576
BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
BLOCKS |= {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
BLOCKS |= {"qk_rope_head_dim": 64}
WHOLE = {"num_hidden_layers": 61}
V32 = KIMI | BLOCKS | {"n_routed_experts": 8, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("family", "sizes", "form", "count"),
    [
        pytest.param("deepseek_v2", LITE, None, 5_291, id="V2-Lite"),
        pytest.param("deepseek_v3", KIMI | BLOCKS, "fp8", 2_349, id="Kimi-K2"),
        pytest.param("deepseek_v3", KIMI, "int4", 3_485, id="Kimi-K2-Thinking"),
        pytest.param("deepseek_v32", V32, "fp8", 107, id="V3.2"),
        pytest.param(
            "deepseek_v3", KIMI | BLOCKS | WHOLE, "fp8", 139_583, id="Kimi-K2-whole",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_every_tensor_of_a_published_index_is_read_once(
    family: str, sizes: dict[str, Any], form: str | None, count: int
) -> None:
    config = {**tiny_config(family), "moe_intermediate_size": 32, **sizes}
    model = build_model(config, "bfloat16")
    files = stored(model, [*published_names(config)], form)
    checkpoint: Checkpoint = files
    if form is not None:
        scheme = quantization_scheme({"quantization_config": FP8 if form == "fp8" else INT4})
        assert scheme is not None
        checkpoint = QuantisedCheckpoint(files, scheme)
    kept, _ = params_of(model, checkpoint)
    assert set(files.reads) == set(files.tensors) and set(files.reads.values()) == {1}
    assert len(files.tensors) == count
    quantised = {name for name, _ in kept.forms}
    routed = {name for name in published_names(config) if ROUTED.search(name)}
    assert quantised >= routed if form else not quantised
    if form == "int4":
        assert quantised == routed


# ---- the text decoder of Kimi-K2.5, saving, and tensors that are not used

PREFIX = "language_model."


def test_the_text_decoder_of_kimi_k2_5_is_read(tmp_path: Path) -> None:
    """Its config is a part of the file, its tensors have a prefix, and those of images are left."""
    own = {**tiny_config("deepseek_v3"), "moe_intermediate_size": 32}
    plain = build_model(own, "float32")
    floats = random_hf_tensors(plain)
    scheme = quantization_scheme({"quantization_config": INT4})
    assert scheme is not None
    packed = dict(floats)
    for name in [name for name in floats if ROUTED.search(name)]:
        packed |= packed_int4(name, packed.pop(name))
    text = {key: value for key, value in own.items() if key != "architectures"}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2", "quantization_config": INT4},
        "vision_config": {"hidden_act": "gelu", "num_attention_heads": 3},
        "bos_token_id": 5,
        "media_placeholder_token_id": 6,
    }
    images = {
        f"{part}.weight": np.ones((2, 2), np.float32) for part in ("vision_tower", "mm_projector")
    }
    prefixed = {PREFIX + name: tensor for name, tensor in packed.items()}
    folder = write_hf_folder(tmp_path / "model", config, {**prefixed, **images})
    source = resolve_source(str(folder), cache_dir=tmp_path, progress=NO_PROGRESS)
    assert source.hf_config["bos_token_id"] == 5 and source.checkpoint is not None
    model = build_model(source.hf_config, "float32")
    kept, params = params_of(model, source.checkpoint)
    assert len(kept.forms) == 3 * 12
    dense, expected = params_of(plain, QuantisedCheckpoint(Typed(packed), scheme))
    ids = jnp.arange(7)
    np.testing.assert_array_equal(forward(kept, params, ids), forward(dense, expected, ids))
    assert "int4" in params["layers_1"]["gate_up"]


def packed_int4(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor as compressed-tensors stores it: element i of a word of eight at bits 4i."""
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, -1, 32)
    scales = np.abs(groups).max(2) / 7
    values = np.rint(groups / scales[..., None]).astype(np.int64).reshape(outputs, -1, 8) + 8
    words = (values << (4 * np.arange(8))).sum(2).astype(np.uint32).view(np.int32)
    stem = name.removesuffix("weight")
    return {
        f"{stem}weight_packed": words,
        f"{stem}weight_scale": scales.astype(np.float32),
        f"{stem}weight_shape": np.array((outputs, inputs), np.int64),
    }


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_saved_tensors_are_those_that_were_loaded(name: str) -> None:
    model, _ = tiny_model(name)
    tensors = random_hf_tensors(model)
    _, params = params_of(model, InMemory(tensors))
    saved = ParamsCheckpoint(model, params)
    assert set(saved.tensors) == set(tensors)
    for one, tensor in tensors.items():
        np.testing.assert_array_equal(saved.read(one), tensor, err_msg=one)


def test_another_number_of_key_heads_of_hunyuan_4_is_that_of_queries() -> None:
    """Published files have such a number, which transformers replaces."""
    config = tiny_config("hy_v4")
    other = build_model({**config, "num_key_value_heads": 2}, "float32")
    assert other.config == build_model(config, "float32").config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v2", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "'num_key_value_heads' is 2, and this fam"),
        (
            "deepseek_v2",
            {"norm_topk_prob": True},
            "'norm_topk_prob' is True, and this family suppo",
        ),
        ("deepseek_v2", {"scoring_func": "tanh"}, "'scoring_func' is 'tanh'; known scoring"),
        ("deepseek_v2", {"topk_method": "best"}, "'topk_method' is 'best'; known methods are"),
        (
            "deepseek_v2",
            {"moe_layer_freq": 2},
            "'moe_layer_freq' is 2, and this family supports only",
        ),
        ("deepseek_v2", {"num_experts_per_tok": 8}, "'num_experts_per_tok' is 8, and a token can"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "must be even for rope, got 7"),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            "'topk_method' is 'greedy', and this family supp",
        ),
        (
            "deepseek_v3",
            {"n_group": 5},
            "'n_group' is 5, and 12 experts cannot be divided into so many",
        ),
        (
            "deepseek_v3",
            {"qk_head_dim": 24},
            "is 24, and this family supports only 20; remove it from config.json if",
        ),
        ("deepseek_v3", {"q_lora_rank": 0}, "'q_lora_rank' must be a positive integer, got 0"),
        ("deepseek_v3", {"index_topk": 64}, "'index_topk' is 64, which DeepseekV3ForCausalLM does"),
        ("deepseek_v32", {"q_lora_rank": None}, "is null; the indexer needs the queries' latent"),
        ("deepseek_v32", {"index_head_dim": 4}, "'index_head_dim' is 4, less than 'qk_rope_head"),
        (
            "deepseek_v32",
            {"indexer_rope_interleave": True},
            "is True, and this family supports only",
        ),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, "the first layer needs an indexer"),
        ("axk2", {"n_group": None}, "'n_group' and 'topk_group' have to be set together"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 0, 0]}, "has 0 for layer 3, which is not"),
        ("mistral_large4", {"no_rope_layers": [1]}, "must hold 0 or 1 for each of the 4 layers"),
        ("mistral_large4", {"q_lora_rank": 8}, "is 8, and queries have no latent; remove it"),
        ("hy_v4", {"indexer_rope_interleave": False}, "is False, and this family supports only"),
        ("hy_v4", {"gating_type": "headwise"}, "is 'headwise', and this family supports only"),
        ("hy_v4", {"swiglu_limit": 0.0}, "'swiglu_limit' must be a positive number"),
        ("glm5_next", {"qk_rope_head_dim": 8}, "is 8, and this family supports only 0"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, "is False, and this family supp"),
        ("glm5_next", {"index_kpool": 3}, "'index_topk' 8 is not a multiple of 'index_kpool' 3"),
        ("glm5_next", {"indexer_types": ["full", *["shared"] * 3]}, "lets layer 1 attend to the"),
        ("glm5_next", {"indexer_types": ["full"] * 2 + ["shared"] * 2}, "lets layer 3 attend to"),
        ("glm5_next", {"linear_attn_config": [4]}, "'linear_attn_config' must be an object, got"),
        ("glm5_next", {"linear_attn_config": {"gate": 1}}, "has the key 'gate', which this family"),
        ("glm5_next", {"linear_attn_config": {"kda_layers": [1]}}, "has other layers in 'kda_laye"),
        ("glm5_next", {"linear_attn_config": {"num_heads": 0}}, "'num_heads' must be a positive"),
        ("glm5_next", {"linear_attn_config": {"gate_lower_bound": 1}}, "above -10000, got 1"),
    ],
)
def test_a_wrong_config_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model({**tiny_config(family), **change}, "float32")
