"""Keys of dots3-note's config.json, which published files and transformers write otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import build_model
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig
from kit.tiny_models import tiny_config

_WIDTHS = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "head_dim")
_WIDTHS += ("qk_nope_head_dim", "v_head_dim")


def canonical() -> dict[str, Any]:
    """The tiny config as transformers saves it."""
    published = tiny_config("dots3_note")
    sizes = {name: published.pop(f"swa_{name}") for name in _WIDTHS}
    shared = published.pop("moe_shared_expert_intermediate_size")
    window = published.pop("sliding_window_size")
    return {
        **published,
        "sliding_window": window,
        "shared_experts_intermediate_size": shared,
        "layer_types": ["sliding_attention", "indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "per_layer_config": {"0": sizes, "2": sizes},
        "rope_parameters": {
            "indexed_attention": {"rope_type": "default", "rope_theta": 8e7},
            "sliding_attention": {
                **{"rope_type": "default", "rope_theta": 5e4},
                "partial_rotary_factor": 0.4,
            },
        },
    }


def test_both_forms_are_the_same_model() -> None:
    published = build_model(tiny_config("dots3_note"), "float32").config
    assert build_model(canonical(), "float32").config == published
    assert isinstance(published.layers[1].mixer, IndexedLatentConfig)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_layer_config", {"1": {"kv_lora_rank": 16}}),
        ("per_layer_config", {"0": {"kv_lora_rank": 16}, "2": {"kv_lora_rank": 8}}),
        ("per_layer_config", {"0": {"index_topk": 16}, "2": {"index_topk": 16}}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("index_head_dim", 4),
        ("moe_layer_freq", [1, 1]),
        ("mlp_bias", True),
    ],
)
def test_what_is_not_supported_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        build_model({**canonical(), "mlp_layer_types": None, key: value}, "float32")


def test_the_part_that_rotates_is_the_rest_of_a_head() -> None:
    with pytest.raises(ConfigError, match="'swa_qk_rope_head_dim' is 4"):
        build_model({**tiny_config("dots3_note"), "swa_qk_rope_head_dim": 4}, "float32")
