"""Configs of Gemma 4: sizes of published models, both spellings of sizes by layer, wrong values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models import build_model
from jaxinfer.models.experts import unused_parameters
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import text_config
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.dummy import dummy_params
from kit.tiny_models import tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(count: int, period: int) -> list[str]:
    return [SLIDING if (i + 1) % period else FULL for i in range(count)]


COMMON: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
}
LARGE: dict[str, Any] = {
    **COMMON,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "sliding_window": 1024,
}
PUBLISHED: dict[str, dict[str, Any]] = {  # sizes in transformers' convert_gemma4_weights
    "31B": {
        **LARGE,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "26B-A4B": {
        **LARGE,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "moe_intermediate_size": 704,
        "top_k_experts": 8,
    },
    "E2B": {
        **COMMON,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": layer_types(35, 5),
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
}


def parameters(name: str) -> tuple[int, int]:
    """Numbers of parameters: all, and those that a token uses, without the embeddings of layers."""
    model = build_model(PUBLISHED[name], "bfloat16")
    sizes = {path: math.prod(array.shape) for path, array in model.arrays.items()}
    total = sum(sizes.values())
    return total, total - unused_parameters(model.config) - sizes.get("layer_inputs/embed", 0)


def test_published_sizes() -> None:
    """Billions of parameters as on the model cards; E2B's total has parts for images and audio."""
    assert [round(n / 1e9, 1) for n in parameters("31B")] == [30.7, 30.7]
    assert [round(n / 1e9, 1) for n in parameters("26B-A4B")] == [25.2, 3.8]
    assert round(parameters("E2B")[1] / 1e9, 1) == 2.3


def test_layers_use_the_keys_of_the_last_of_their_kind() -> None:
    model = build_model(PUBLISHED["E2B"], "bfloat16")
    mixers = [layer.mixer for layer in model.config.layers]
    sources = {i: m.of for i, m in enumerate(mixers) if isinstance(m, SharedAttentionConfig)}
    assert sources == {i: 14 if (i + 1) % 5 == 0 else 13 for i in range(15, 35)}
    # K and V of three layers of one head of 512, and of twelve of 256
    assert model.state.bytes_per_entry == (3 * 2 * 512 * 2, 12 * 2 * 256 * 2)
    assert mixers[0].words() == "8 query heads and 1 kv heads of 256"
    assert mixers[34].words() == "8 query heads of 512 over the keys of layer 14"
    assert [model.config.layers[i].ffn.words() for i in (14, 15)] == [
        "feed-forward 6144",
        "feed-forward 12288",
    ]


def test_sizes_of_layers_in_both_spellings() -> None:
    """transformers saves them by layer, and publishes keys for those without a window."""
    config = tiny_config("gemma4")
    expected = build_model(config, "float32")
    own = {"head_dim": 16, "num_key_value_heads": 2}
    sizes = {"per_layer_config": {"1": own, "3": own}}
    saved = {key: value for key, value in config.items() if "global" not in key} | sizes
    assert build_model(saved, "float32") == expected
    equal = build_model({**config, "per_layer_config": {}}, "float32")
    assert {entry.shape for entry in equal.state.arrays} == {(4, 8)}


def test_values_are_made_of_keys_only_without_a_window() -> None:
    config = tiny_config("gemma4") | {"attention_k_eq_v": False}
    for name, given, shapes in (
        ("own values", config, [(4, 8), (4, 16)]),
        ("keys", tiny_config("gemma4"), [(4, 8), (2, 16)]),
    ):
        model = build_model(given, "float32")
        assert [e.shape for e in model.state.arrays if e.name == "v"][:2] == shapes, name
        names = {source.name for spec in model.param_specs for source in spec.sources}
        own = [f"model.layers.{i}.self_attn.v_proj.weight" in names for i in range(4)]
        assert own == ([True] * 4 if name == "own values" else [True, False] * 2)


def test_the_last_layer_never_has_a_window() -> None:
    config = tiny_config("gemma4")
    kinds = [*config["layer_types"][:-1], SLIDING]
    assert build_model({**config, "layer_types": kinds}, "float32") == build_model(
        config, "float32"
    )


def test_random_weights_keep_factors_at_1() -> None:
    """Else the stream would vanish in some layers, each of which multiplies it."""
    model = build_model(tiny_config("gemma4_all"), "float32")
    params = dummy_params(model, placement=default_placement(), seed=0, progress=NoProgress())
    factors = {path: array for path, array in by_path(params).items() if path.endswith("_scale")}
    assert len(factors) == 8 and all((array == 1).all() for array in factors.values())


def test_the_text_part_of_a_config_with_images_and_audio() -> None:
    own = tiny_config("gemma4_all")
    names = ["Gemma4ForConditionalGeneration"]
    whole = {
        "architectures": names,
        "text_config": {key: value for key, value in own.items() if key != "architectures"},
        "vision_config": {"hidden_size": 8},
        "audio_config": {"hidden_size": 8},
        "image_token_id": 5,
    }
    assert build_model(text_config(whole), "float32").config == build_model(own, "float32").config


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, "'layer_types' must hold"),
        ({"hidden_activation": "prelu"}, "'hidden_activation' is 'prelu'; known activations"),
        ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        ({"rope_parameters": ROPE}, "'rope_parameters' is .* needs a section for each of"),
        ({"rope_parameters": {FULL: ROPE}}, "'rope_parameters' is .* needs a section for each of"),
        ({"rope_parameters": [ROPE]}, "'rope_parameters' is .* needs a section for each of"),
        (
            {"rope_parameters": {FULL: {"rope_type": "axial"}, SLIDING: ROPE}},
            "rope type 'axial' is unknown",
        ),
        (
            {"rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}, SLIDING: ROPE}},
            "'partial_rotary_factor' is 0.5, and heads of this family rotate whole",
        ),
        ({"num_kv_shared_layers": 4}, "'num_kv_shared_layers' is 4, and no layer of"),
        ({"num_kv_shared_layers": 3}, "'num_kv_shared_layers' is 3, and no layer of full_atten"),
        ({"num_kv_shared_layers": 99}, "'num_kv_shared_layers' is 99, and no layer of"),
        ({"num_global_key_value_heads": 3}, "'num_attention_heads' 4 is not a multiple of the 3"),
        ({"top_k_experts": 8}, "'top_k_experts' is 8, and there are 7 experts"),
        ({"vocab_size_per_layer_input": 100}, "'vocab_size_per_layer_input' is 100, and there"),
        ({"hidden_size_per_layer_input": -1}, "'hidden_size_per_layer_input' must be a positive"),
        ({"final_logit_softcapping": 0}, "'final_logit_softcapping' must be a positive number"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "'per_layer_config' is .*; layers may"),
        (
            {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}},
            "'per_layer_config' is .*; layers may differ",
        ),
        ({"per_layer_config": 3}, "'per_layer_config' is 3, .*; layers may differ"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_model({**tiny_config("gemma4_all"), **change}, "float32")
    assert len(str(error.value)) < 400
