"""Gemma 4 from files: names of published ones, and quantised ones with a tensor for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.models.registry import build_model
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.save import ParamsCheckpoint
from jaxinfer.weights.stacked_experts import UnstackedExperts
from kit import published_formats
from kit.checkpoints import random_hf_tensors, stacked
from kit.memory_checkpoint import Typed
from kit.published_index import check_read_once
from kit.tiny_models import tiny_config
from models.test_gemma4 import PUBLISHED
from weights.test_experts import params_of

type Shapes = Iterator[tuple[str, tuple[int, ...]]]

SMALL = {  # each size another one, and divisible as the published ones are
    "vocab_size": 80,
    "hidden_size": 24,
    "intermediate_size": 20,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OF_LARGE = {"num_global_key_value_heads": 1}
OF_EXPERTS = {**OF_LARGE, "num_experts": 16, "moe_intermediate_size": 12}
OF_SMALL = {"num_key_value_heads": 1, "vocab_size_per_layer_input": 80}
OF_SMALL |= {"hidden_size_per_layer_input": 6}


def published_tensors(config: dict[str, Any]) -> Shapes:
    """Names and shapes as in the index of the file, written down from the published ones."""
    d, v, start = config["hidden_size"], config["vocab_size"], "model.language_model."
    inputs, layers = config.get("hidden_size_per_layer_input"), config["num_hidden_layers"]
    yield from ((f"{start}embed_tokens.weight", (v, d)), (f"{start}norm.weight", (d,)))
    yield "model.vision_tower.patch_embedder.input_proj.weight", (6, 2)
    yield "model.embed_vision.embedding_projection.weight", (d, 6)
    if inputs:
        yield "model.audio_tower.output_proj.weight", (6, 2)
        yield f"{start}embed_tokens_per_layer.weight", (v, layers * inputs)
        yield f"{start}per_layer_model_projection.weight", (layers * inputs, d)
        yield f"{start}per_layer_projection_norm.weight", (inputs,)
    for i in range(layers):
        for name, shape in layer_tensors(config, i):
            yield f"{start}layers.{i}.{name}", shape


def layer_tensors(config: dict[str, Any], layer: int) -> Shapes:
    d, f = config["hidden_size"], config["intermediate_size"]
    n, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kinds = config.get("layer_types")
    full = kinds[layer] == "full_attention" if kinds else (layer + 1) % 6 == 0
    h = config["global_head_dim"] if full else config["head_dim"]
    keys_too = config.get("attention_k_eq_v", False) and full
    k = config["num_global_key_value_heads" if keys_too else "num_key_value_heads"]
    has_own = layer < layers - config.get("num_kv_shared_layers", 0)
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{norm}_layernorm.weight", (d,)
    yield "layer_scalar", (1,)
    yield "self_attn.q_proj.weight", (n * h, d)
    yield "self_attn.o_proj.weight", (d, n * h)
    yield "self_attn.q_norm.weight", (h,)
    if has_own:
        yield "self_attn.k_proj.weight", (k * h, d)
        yield "self_attn.k_norm.weight", (h,)
    if has_own and not keys_too:
        yield "self_attn.v_proj.weight", (k * h, d)
    wide = 1 if has_own or not config.get("use_double_wide_mlp") else 2
    yield from (("mlp.gate_proj.weight", (wide * f, d)), ("mlp.up_proj.weight", (wide * f, d)))
    yield "mlp.down_proj.weight", (d, wide * f)
    if inputs := config.get("hidden_size_per_layer_input"):
        yield "per_layer_input_gate.weight", (inputs, d)
        yield "per_layer_projection.weight", (d, inputs)
        yield "post_per_layer_input_norm.weight", (d,)
    if config.get("enable_moe_block"):
        e, width = config["num_experts"], config["moe_intermediate_size"]
        for norm in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"):
            yield f"{norm}.weight", (d,)
        yield "post_feedforward_layernorm_2.weight", (d,)
        yield from (("router.proj.weight", (e, d)), ("router.scale", (d,)))
        yield "router.per_expert_scale", (e,)
        yield "experts.gate_up_proj", (e, 2 * width, d)
        yield "experts.down_proj", (e, d, width)


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [("31B", OF_LARGE, 832), ("26B-A4B", OF_EXPERTS, 657), ("E2B", OF_SMALL, 540)],
)
def test_every_tensor_of_a_published_index_is_read_once(
    name: str, sizes: dict[str, Any], count: int
) -> None:
    own = {**PUBLISHED[name], **SMALL, **sizes}
    tensors = dict(published_tensors(own))
    text = {key: value for key, value in own.items() if key != "architectures"}
    whole = {"architectures": own["architectures"], "text_config": text, "image_token_id": 5}
    unused = r"model\.(vision_tower|embed_vision|audio_tower)\..*"
    check_read_once(whole, tensors, count, unused)


def small_config() -> dict[str, Any]:
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    two = {"num_hidden_layers": 2, "num_kv_shared_layers": 0}
    kinds = ["sliding_attention", "full_attention"]
    return {**tiny_config("gemma4_all"), **wide, **two, "layer_types": kinds}


def test_fp8_with_a_scale_for_each_row_of_each_expert() -> None:
    """Published by Red Hat: compressed-tensors has matrices of single experts, no stacks."""
    model, rng = build_model(small_config(), "float32"), np.random.default_rng(0)
    floats, stored = random_hf_tensors(model), dict[str, np.ndarray]()
    for name, tensor in floats.items():
        kept = re.search(r"embed|router|per_layer|norm", name) or tensor.ndim != 2
        published = re.sub("^model", "model.language_model", name)
        if kept:
            stored[published] = tensor
            continue
        values = tensor.astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, (tensor.shape[0], 1)).astype(np.float32)
        stored |= {published: values, f"{published}_scale": scales}
        floats[name] = values.astype(np.float32) * scales
    assert "model.language_model.layers.1.experts.6.down_proj.weight_scale" in stored
    config, _, _ = published_formats.published("Qwen3-FP8-dynamic")
    config = {**config, "ignore": ["lm_head", r"re:.*router", "re:.*per_layer.*"]}
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    files = Typed(stored)
    kept, params = params_of(model, UnstackedExperts(QuantisedCheckpoint(files, scheme)))
    assert set(files.reads) == set(stored) and set(files.reads.values()) == {1}
    assert sum(".experts." in name for name, _ in kept.forms) == 2 * 7 * 3
    read = ParamsCheckpoint(kept, params)
    for name, tensor in floats.items():
        np.testing.assert_allclose(read.read(name), tensor, rtol=1e-6, err_msg=name)


def test_experts_that_a_quantised_file_leaves_stacked() -> None:
    """The other matrices are quantised."""
    model = build_model(small_config(), "float32")
    floats = random_hf_tensors(model)
    name = "model.layers.0.mlp.down_proj.weight"
    values, scales = floats[name].astype(ml_dtypes.float8_e4m3fn), np.ones((64, 1), np.float32)
    stored = stacked(floats) | {name: values, f"{name}_scale": scales}
    config, _, _ = published_formats.published("Qwen3-FP8-dynamic")
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    checkpoint = UnstackedExperts(QuantisedCheckpoint(Typed(stored), scheme))
    kept, params = params_of(model, checkpoint)
    assert [one for one, _ in kept.forms] == [name]
    one = floats["model.layers.1.experts.5.up_proj.weight"]
    np.testing.assert_array_equal(params["layers_1"]["gate_up"][5, 32:], one)
