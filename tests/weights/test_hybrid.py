"""Qwen3.5 and Qwen3-Next from files: names of published ones, stacked experts, blocks of fp8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.models.base import forward
from jaxinfer.models.registry import build_model
from jaxinfer.weights.plan import canonical_name
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.sources import resolve_source
from jaxinfer.weights.stacked_experts import UnstackedExperts
from kit.checkpoints import random_hf_tensors, write_hf_folder
from kit.memory_checkpoint import InMemory, Typed
from kit.published_index import check_read_once
from kit.tiny_models import tiny_config
from weights.test_experts import params_of
from weights.test_latent import FP8

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
PUBLISHED["qwen3.5-4b"] = {  # whose files have the parts for images, too
    **json.loads((SHAPES / "qwen3.5-4b" / "config.json").read_text()),
    "architectures": ["Qwen3_5ForConditionalGeneration"],
}
SMALL = {  # each size another one, and divisible as the published ones are
    "vocab_size": 80,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
NETWORK = ("gate_proj", "up_proj", "down_proj")


def published_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in the index of the file, written down from the published ones."""
    d, v = config["hidden_size"], config["vocab_size"]
    has_images = "ForConditionalGeneration" in config["architectures"][0]
    start = "model.language_model." if has_images else "model."
    yield from ((f"{start}embed_tokens.weight", (v, d)), (f"{start}norm.weight", (d,)))
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (v, d)
    if has_images:
        yield "model.visual.blocks.0.attn.qkv.weight", (6, 2)
        yield "model.visual.merger.norm.weight", (2,)
    for i in range(config["num_hidden_layers"]):
        layer = f"{start}layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (d,)
        is_full = (i + 1) % config["full_attention_interval"] == 0
        mixer = attention(config) if is_full else delta(config)
        yield from ((layer + name, shape) for name, shape in mixer)
        yield from ((f"{layer}mlp.{name}", shape) for name, shape in network(config))


def attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, h = config["hidden_size"], config["head_dim"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    for name, outputs in (("q", 2 * n * h), ("k", k * h), ("v", k * h)):
        yield f"self_attn.{name}_proj.weight", (outputs, d)
    yield "self_attn.o_proj.weight", (d, n * h)
    yield from ((f"self_attn.{name}_norm.weight", (h,)) for name in "qk")


def delta(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    own = "linear_attn."
    if config["architectures"] == ["Qwen3NextForCausalLM"]:
        yield f"{own}in_proj_qkvz.weight", (2 * keys + 2 * values, d)
        yield f"{own}in_proj_ba.weight", (2 * heads, d)
    else:
        yield f"{own}in_proj_qkv.weight", (2 * keys + values, d)
        yield f"{own}in_proj_z.weight", (values, d)
        yield from ((f"{own}in_proj_{name}.weight", (heads, d)) for name in "ab")
    yield f"{own}conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield from ((f"{own}{name}", (heads,)) for name in ("A_log", "dt_bias"))
    yield f"{own}norm.weight", (config["linear_value_head_dim"],)
    yield f"{own}out_proj.weight", (d, values)


def network(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = config["hidden_size"]

    def dense(start: str, f: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        shapes = ((f, d), (f, d), (d, f))
        yield from ((f"{start}{n}.weight", s) for n, s in zip(NETWORK, shapes, strict=True))

    if "num_experts" not in config:
        yield from dense("", config["intermediate_size"])
        return
    e, f = config["num_experts"], config["moe_intermediate_size"]
    yield "gate.weight", (e, d)
    yield "shared_expert_gate.weight", (1, d)
    yield from dense("shared_expert.", config["shared_expert_intermediate_size"])
    if config["architectures"] == ["Qwen3NextForCausalLM"]:
        for expert in range(e):
            yield from dense(f"experts.{expert}.", f)
        return
    yield from (("experts.gate_up_proj", (e, 2 * f, d)), ("experts.down_proj", (e, d, f)))


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [
        ("qwen3.5-4b", {}, 426),
        ("qwen3.5-27b", {}, 851),
        ("qwen3.5-35b-a3b", {"num_experts": 16}, 693),
        ("qwen3-next-80b-a3b", {"num_experts": 16, "num_hidden_layers": 8}, 497),
    ],
)
def test_every_tensor_of_a_published_index_is_read_once(
    name: str, sizes: dict[str, Any], count: int
) -> None:
    config = {**PUBLISHED[name], **SMALL, **sizes}
    if "num_experts" not in PUBLISHED[name]:
        del config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    check_read_once(config, dict(published_tensors(config)), count, r"model\.visual\..*")


def test_stacked_experts_are_those_of_single_tensors() -> None:
    config = tiny_config("qwen3_5_moe")
    model = build_model(config, "float32")
    single = random_hf_tensors(model)
    stacked = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    for i in range(len(model.config.layers)):
        start = f"model.layers.{i}.mlp.experts"
        of = [[single[f"{start}.{e}.{n}.weight"] for n in NETWORK] for e in range(7)]
        stacked[f"{start}.gate_up_proj"] = np.stack([np.concatenate(one[:2]) for one in of])
        stacked[f"{start}.down_proj"] = np.stack([one[2] for one in of])
    _, expected = params_of(model, InMemory(single))
    files = InMemory(stacked)
    _, found = params_of(model, UnstackedExperts(files))
    ids = jnp.arange(9)
    np.testing.assert_array_equal(forward(model, found, ids), forward(model, expected, ids))
    assert set(files.reads.values()) == {1}  # a gate and an up are read together


def test_blocks_of_fp8_outlive_the_order_of_rotated_heads_and_gates() -> None:
    """Heads that rotate in part leave the blocks with which they share scales."""
    wide = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "vocab_size": 96}
    config = {**tiny_config("qwen3_5"), **wide, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2}
    config |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model, rng = build_model(config, "float32"), np.random.default_rng(0)
    floats, stored = random_hf_tensors(model), dict[str, np.ndarray]()
    for name, tensor in floats.items():
        small = tensor.ndim != 2 or name.endswith(("_a.weight", "_b.weight"))
        if small or name in ("lm_head.weight", "model.embed_tokens.weight"):
            stored[name] = tensor
            continue
        values = tensor.astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, [size // 128 for size in tensor.shape]).astype(np.float32)
        stored |= {name: values, f"{name}_scale_inv": scales}
        floats[name] = values.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))
    scheme = quantization_scheme({"quantization_config": FP8})
    assert scheme is not None
    kept, params = params_of(model, QuantisedCheckpoint(Typed(stored), scheme))
    forms = {name.removeprefix("model.layers."): str(form) for name, form in kept.forms}
    assert forms["1.self_attn.q_proj.weight"] == "fp8 128x128"
    _, expected = params_of(model, InMemory(floats))
    ids = jnp.arange(40) % 96
    logits = forward(kept, params, ids)
    np.testing.assert_allclose(logits, forward(model, expected, ids), atol=2e-4, rtol=2e-4)


def test_a_config_with_images_says_how_the_whole_model_is_quantised(tmp_path: Path) -> None:
    """As in Qwen3.5-FP8: transformers writes it beside the config of the text, as a tied head."""
    own = tiny_config("qwen3_5")
    tensors, kept = random_hf_tensors(build_model(own, "float32")), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        stored = name.replace("model.", "model.language_model.", 1)
        if name.endswith("mlp.up_proj.weight"):
            kept[stored] = tensor.astype(ml_dtypes.float8_e4m3fn)
            kept[f"{stored}_scale_inv"] = np.full((1, 1), 2.0, np.float32)
        elif name != "lm_head.weight":
            kept[stored] = tensor
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {key: value for key, value in own.items() if key != "architectures"},
        "quantization_config": FP8,
        "tie_word_embeddings": True,
    }
    folder = write_hf_folder(tmp_path / "model", config, kept)
    source = resolve_source(str(folder), cache_dir=tmp_path, progress=NO_PROGRESS)
    model = build_model(source.hf_config, "float32")
    assert source.checkpoint is not None and model.config.tie_word_embeddings
    found, params = params_of(model, source.checkpoint)
    assert len(found.forms) == 3
    del tensors["lm_head.weight"]
    for name in [name for name in tensors if name.endswith("mlp.up_proj.weight")]:
        tensors[name] = 2 * tensors[name].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    _, expected = params_of(model, InMemory(tensors))
    ids = jnp.arange(9)
    np.testing.assert_allclose(
        forward(found, params, ids), forward(model, expected, ids), atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention", "x"]}, "'layer_types' must"),
        ({"layer_types": ["linear_attention"]}, "for each of the 3 layers"),
        ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' is 'bfloat16'"),
        ({"attn_output_gate": False}, "'attn_output_gate' is False"),
        ({"output_gate_type": "sigmoid"}, "'output_gate_type' is 'sigmoid'"),
        ({"linear_num_value_heads": 3}, "3 is not a multiple of 'linear_num_key_heads' 2"),
        ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' must be a positive integer"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"full_attention_interval": "4"}, "'full_attention_interval' must be"),
    ],
)
def test_bad_configs_are_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_model({**tiny_config("qwen3_5"), **change}, "float32")
    assert "\n" not in str(error.value)


def test_gates_are_never_quantised() -> None:
    model = build_model(tiny_config("qwen3_5"), "float32")
    quantised = {s.name for spec in model.param_specs if spec.is_linear for s in spec.sources}
    kinds = {name.rpartition("linear_attn.")[2] for name in quantised if "linear_attn" in name}
    assert kinds == {f"{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "out_proj")}


def test_names_of_a_model_with_images() -> None:
    family = build_model(tiny_config("qwen3_5"), "float32").family
    for name in ("layers.0.linear_attn.A_log", "embed_tokens.weight", "norm.weight"):
        assert canonical_name(family, f"model.language_model.{name}") == f"model.{name}"
    assert canonical_name(family, "lm_head.weight") == "lm_head.weight"
