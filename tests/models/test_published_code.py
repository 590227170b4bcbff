"""Families that transformers lacks next to a reference in NumPy (``kit.published_code``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import Model, build_model, forward
from jaxinfer.models.params import nested
from kit import published_code, published_decoders, published_newer
from kit.checkpoints import built_arrays
from kit.tiny_models import tiny_config

LENGTH = 24
REFERENCES = (published_code, published_decoders, published_newer)
_MISTRAL_ROPE: dict[str, Any] = tiny_config("mistral_large3")["rope_parameters"]
CASES: dict[str, dict[str, Any]] = {
    "chatglm": {},
    "chatglm heads": {"multi_query_attention": False, "add_bias_linear": True, "rope_ratio": 50.0},
    "telechat2": {},
    "telechat2 plain": {"base_seqlen": 512, "num_key_value_heads": 4},
    "telechat3": {"rope_theta": 1e6},
    "teleflm": {},
    "teleflm plain": {"use_mup": False},
    "openpangu": {},
    "openpangu qkv": {"bias": False, "qkv_bias": True},
    "openpangu_ultra": {"rms_norm_eps": 0.1},
    "openpangu_ultra before": {"sandwich_norm": False, "router_enable_expert_bias": False},
    "openpangu_pro": {},
    "openpangu_pro before": {
        **{"sandwich_norm": False, "router_enable_expert_bias": False, "attention_bias": True},
        **{"param_sink_with_value": False, "n_shared_experts": 0, "norm_topk_prob": False},
    },
    "plamo3": {},
    "plamo3 untied": {"tie_word_embeddings": False, "scale_embedding": True},
    "param2moe": {},
    "param2moe plain": {"use_qk_norm": False, "use_qkv_bias": True, "norm_topk_prob": False},
    "solar": {},
    "solar window": {"sliding_window": 7, "logit_scale": 0.5, "bskcn_3": [3], "bskcn_4": [2, 3]},
    "rnj1": {},
    "rnj1 plain": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral_large3": {},
    "mistral_large3 unscaled": {
        "rope_parameters": {**_MISTRAL_ROPE, "attention_factor": 1.0},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    },
    "nemotron_h_puzzle": {},
    "iquest_loop": {},
    "iquest_loop wide": {"loop_window_size": 64, "num_key_value_heads": 1},
    "longcat_flash_ngram": {},
    "longcat_flash_ngram fraction": {"ngram_vocab_size_ratio": 1.567, "emb_neighbor_num": 5},
    "k2_horizon": {},
    "k2_horizon plain": {
        **{"attention_gate_func": None, "layernorm_num_groups": 1, "router_score_func": "softmax"},
        **{"moe_gate_bias": False, "attention_bias": True, "mova_num_experts_per_tok": 1},
        **{"mlp_only_layers": [], "num_shared_experts": 0, "rope_head_dim": None},
        "norm_topk_prob": False,
    },
    "k2_horizon no experts": {"num_experts": 0, "rope_head_dim": 16},
    "k2_horizon dense": {"mova_num_experts": 0, "attention_gate_func": "silu"},
    "step1": {},
    "step1 untied": {
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "step3": {},
    "step3 renormalised": {"norm_expert_weight": True, "moe_layers_enum": "2", "moe_top_k": 3},
}


def random_tensors(model: Model) -> dict[str, np.ndarray]:
    """Values so large that every part shows in the logits."""
    rng, made = np.random.default_rng(0), {}
    for source in (source for spec in model.param_specs for source in spec.sources):
        noise = rng.standard_normal(source.shape, np.float32)
        if len(source.shape) > 1:
            noise *= 1.5 / source.shape[-1] ** 0.5
        elif "norm" in source.name and not source.name.endswith("bias"):
            noise = 1 + 0.2 * noise
        made[source.name] = noise
    return made


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(case: str) -> None:
    name = case.split()[0]
    config = tiny_config(name) | CASES[case]
    model = build_model(config, "float32")
    tensors = random_tensors(model)
    ids = np.random.default_rng(1).integers(0, 96, LENGTH)
    ids[[9, 10, 16]] = 2  # ends a text
    own = next(one for one in REFERENCES if name in one.MODELS)
    expected = own.logits(name, config, tensors, ids)
    params = nested(built_arrays(model, tensors))
    found = jax.jit(lambda ids: forward(model, params, ids))(jnp.asarray(ids))
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("chatglm", "rmsnorm", False),
        ("chatglm", "apply_residual_connection_post_layernorm", True),
        ("chatglm", "original_rope", False),
        ("chatglm", "quantization_bit", 4),
        ("telechat2", "apply_residual_connection_post_layernorm", True),
        ("openpangu", "sandwich_norm", True),
        ("openpangu", "param_sink_number", 128),
        ("openpangu_ultra", "use_mhc", True),
        ("k2_horizon", "query_key_norm", True),
        ("k2_horizon", "layernorm_num_groups", 5),
        ("k2_horizon", "attention_gate_func", "sigmoid"),
        ("k2_horizon", "router_score_func", "sqrtsoftplus"),
        ("openpangu_pro", "rope_theta", 5e5),
        ("openpangu_pro", "interleaved_sliding_window", [512]),
        ("openpangu_pro", "v_channels", 17),
        ("openpangu_pro", "param_sink_number", 0),
        ("plamo3", "linear_type", "fp8"),
        ("param2moe", "use_bias", True),
        ("solar", "bskcn_1", [0]),
        ("solar", "bskcn_3", [0]),
        ("solar", "bskcn_tv", [0.9]),
        ("step1", "num_key_value_heads", 6),
        ("step3", "num_attention_groups", 2),
        ("step3", "moe_layers_enum", "one"),
        ("param2moe", "score_function", "softmax"),
        ("rnj1", "hidden_activation", "silu"),
        ("dory", "recurrent_kv_cache_mode", "last_loop"),
        ("dory", "rope_theta", 1e4),
        ("dory", "n_recurrent_layers", 6),
        ("dory", "n_input_layers", 3),
        ("dory", "layer_types", ["mlp", "full_attention"] * 4),
        ("nemotron_h_puzzle", "n_shared_experts", 2),
        ("nemotron_h_puzzle", "n_shared_experts", 0),
        ("rnj1", "layer_types", ["sliding_attention"] * 3),
        ("rnj1", "layer_types", None),
        ("rnj1", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("mistral_large3", "topk_method", "noaux_tc"),
        ("mistral_large3", "llama_4_scaling", 8192),
        ("nemotron_h_puzzle", "block_configs", [{"block_type": "attention", "q_indexer_dim": 8}]),
        ("nemotron_h_puzzle", "block_configs", [{"block_type": "conv"}]),
        ("longcat_flash_ngram", "emb_split_num", 40),
        ("longcat_flash_ngram", "ngram_vocab_size_ratio", 10**7),
        ("iquest_loop", "loop_num", 3),
        ("iquest_loop", "sliding_window", 64),
        ("iquest_loop", "attention_bias", True),
    ],
)
def test_what_no_published_file_has_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        build_model({**tiny_config(name), key: value}, "float32")


def test_the_first_names_of_pangu_s_keys() -> None:
    config = tiny_config("openpangu_ultra")
    first = {
        "attention_kv_lora_dim": config.pop("kv_lora_rank"),
        "attention_q_lora_dim": config.pop("q_lora_rank"),
        "attention_qk_rope_dim": config.pop("qk_rope_head_dim"),
        "attention_qk_dim": config.pop("qk_nope_head_dim"),
        "attention_v_dim": config.pop("v_head_dim"),
        "num_routed_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
        "num_dense_layers": config.pop("first_k_dense_replace"),
    }
    expected = build_model(tiny_config("openpangu_ultra"), "float32")
    assert build_model(config | first, "float32").config == expected.config
