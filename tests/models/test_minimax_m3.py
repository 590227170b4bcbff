"""MiniMax-M3's config.json as it is published, with the indexer in a section of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import abstract_params, build_model
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import text_config
from jaxinfer.nn.mixers.indexed_attention_spec import BlockIndexerConfig, IndexedAttentionConfig
from kit.tiny_models import tiny_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs_read.json"
TEXT: dict[str, Any] = json.loads(CONFIGS.read_text())["minimax-m3"]
SECTION: dict[str, Any] = TEXT["sparse_attention_config"]
WHOLE = {  # whose text_config has no model type
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": TEXT,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1280},
    "image_token_index": 200025,
}


def test_the_published_config() -> None:
    model = build_model(text_config(WHOLE), "bfloat16")
    indexer = BlockIndexerConfig(num_heads=4, head_dim=128, block=128, top_k=16, local=1)
    mixers = [layer.mixer for layer in model.config.layers]
    found = [one.indexer if isinstance(one, IndexedAttentionConfig) else None for one in mixers]
    assert found == [None] * 3 + [indexer] * 57
    assert mixers[0].rope == mixers[3].rope and mixers[3].rope is not None
    assert mixers[3].rope.width == 64
    sizes = (math.prod(leaf.shape) for leaf in by_path(abstract_params(model)).values())
    assert round(sum(sizes) / 1e9) == 426  # 427 billion with the encoder of images
    # a token's 16-bit entries: keys and values of 60 layers, keys of 57 indexers
    assert model.state.bytes_per_entry == (60 * 2 * 4 * 128 * 2, 57 * 128 * 2)


def test_keys_of_transformers_and_of_published_files_mean_the_same() -> None:
    own = {
        **{key: value for key, value in TEXT.items() if "sparse" not in key},
        **{"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128},
        **{"index_topk_blocks": 16, "index_local_blocks": 1},
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    }
    assert build_model(own, "bfloat16").config == build_model(TEXT, "bfloat16").config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sparse_init_block": 1}, "'sparse_init_block' is 1"),
        ({"sparse_score_type": "mean"}, "'sparse_score_type' is 'mean'"),
        ({"use_sparse_attention": False}, "'use_sparse_attention' is False"),
        ({"sparse_disable_index_value": [0] * 60}, "'sparse_disable_index_value' is 0 for"),
        ({"sparse_attention_freq": [1]}, "'sparse_attention_freq' must hold 0 or 1 for each of"),
        ({"sparse_window": 5}, r"'sparse_attention_config' holds \['sparse_window'\]"),
        (
            {"sparse_num_index_heads": 2},
            "'index_n_heads', or 'sparse_num_index_heads', is 2 and must be 4",
        ),
        ({"sparse_index_dim": 32}, "'index_head_dim', or .* is 32 and must be at least 64, which"),
        ({"sparse_local_block": 17}, "'index_local_blocks', or .* is 17 and must be at most 16"),
    ],
)
def test_other_choices_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"config key {named}"):
        build_model({**TEXT, "sparse_attention_config": {**SECTION, **changes}}, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rotary_dim": 32}, "'rotary_dim' is 32, but by 'partial_rotary_factor' 8 components"),
        ({"use_gemma_norm": False}, "'use_gemma_norm' is False"),
        ({"attention_output_gate": True}, "'attention_output_gate' is True"),
        ({"n_shared_experts": 2}, "'n_shared_experts' is 2"),
        ({"swiglu_beta": 0.5}, "'swiglu_beta' is 0.5"),
        ({"moe_layer_freq": [1, 2, 1]}, "'moe_layer_freq' must hold 0 or 1 for each of the 3"),
        ({"sparse_attention_config": [1]}, "'sparse_attention_config' must be an object"),
    ],
)
def test_other_keys_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"config key {named}"):
        build_model({**tiny_config("minimax_m3"), "rotary_dim": 8, **changes}, "float32")
