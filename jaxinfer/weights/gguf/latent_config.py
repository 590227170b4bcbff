"""Builds the configs of decoders with latent attention from GGUF metadata.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's
src/models/{deepseek2,minicpm3}.cpp.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.rope import deepseek_rope_scaling, rope_scaling


def deepseek2_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """DeepSeek V2 and V3, which score experts by softmax and sigmoid.

    Newer files describe the attention as it is computed over latents, with one kv head, and have
    the widths of a head under keys of their own. Files without ``expert_group_count`` are computed
    without groups, as llama.cpp does.
    """
    heads, rope_dim = meta.count("attention.head_count"), meta.count("rope.dimension_count")
    rank, widths = meta.count("attention.kv_lora_rank"), ("key_length", "value_length")
    if meta.has("attention.key_length_mla"):
        meta.only("attention.head_count_kv", 1)
        meta.only("attention.key_length", rank + rope_dim)
        meta.only("attention.value_length", rank)
        widths = ("key_length_mla", "value_length_mla")
    else:
        meta.only("attention.head_count_kv", heads)
    key_dim, value_dim = (meta.count(f"attention.{width}") for width in widths)
    return {
        **_sizes(meta, widths[0], key_dim - rope_dim, value_dim),
        "rope_scaling": deepseek_rope_scaling(meta, rope_dim),
        **_deepseek_experts(meta),
    }


def _sizes(
    meta: ArchitectureMetadata, width: str, without_rope: int, value_dim: int
) -> dict[str, Any]:
    """The keys that all have; ``width`` is the key of the width of a head's key, of which so many
    components do not rotate.

    Raises ``CheckpointError`` if none are left.
    """
    rope_dim = meta.count("rope.dimension_count")
    if without_rope <= 0:
        words = f"must exceed rope.dimension_count, which is {rope_dim}"
        meta.refuse(f"attention.{width}", without_rope + rope_dim, words)
    meta.only("attention.scale", 0)
    meta.only("hidden_activation", "silu", "swish")
    return {
        "hidden_size": meta.count("embedding_length"),
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": meta.count("attention.head_count"),
        "q_lora_rank": meta.count_if_set("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": without_rope,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
    }


def minicpm3_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """MiniCPM3, whose factors are llama.cpp's constants."""
    heads, rope_dim = meta.count("attention.head_count"), meta.count("rope.dimension_count")
    meta.only("attention.head_count_kv", heads)
    meta.only("attention.sliding_window", 0)
    meta.only("tensor_data_layout", "reference")
    key_dim, value_dim = (meta.count(f"attention.{one}_length") for one in ("key", "value"))
    return {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        **_sizes(meta, "key_length", key_dim - rope_dim, value_dim),
        "head_dim": rope_dim,
        "rope_scaling": rope_scaling(meta, rope_dim),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _deepseek_experts(meta: ArchitectureMetadata) -> dict[str, Any]:
    meta.only("expert_gating_func", 0, 1, 2)  # 0: older files, of V2
    is_v3 = meta.number_if_set("expert_gating_func") == 2
    groups, chosen_groups = (
        meta.count_if_set(key, 1) for key in ("expert_group_count", "expert_group_used_count")
    )
    method = "noaux_tc" if is_v3 else "greedy" if groups == 1 else "group_limited_greedy"
    version = "V3" if is_v3 else "V2"
    return {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "model_type": f"deepseek_{version.lower()}",
        "first_k_dense_replace": meta.count_if_set("leading_dense_block_count", 0),
        "n_routed_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "n_shared_experts": meta.count_if_set("expert_shared_count", 0),
        "routed_scaling_factor": meta.number_if_set("expert_weights_scale") or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": method,
        "n_group": groups,
        "topk_group": chosen_groups,
    }


def mistral4_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Mistral 4, with DeepSeek's attention, whose queries grow with positions."""
    growth = meta.number("attention.temperature_scale")
    config = deepseek2_config(meta)
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        meta.refuse("attention.temperature_scale", growth, "is supported only beside YaRN")
    meta.only("attention.temperature_length", scaling["original_max_position_embeddings"])
    for key in ("scoring_func", "topk_method"):
        del config[key]
    return config | {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope_scaling": scaling | {"llama_4_scaling_beta": growth},
    }
