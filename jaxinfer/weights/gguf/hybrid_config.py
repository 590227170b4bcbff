"""Builds the configs of decoders with the gated delta rule from GGUF metadata.

Source: ``load_arch_hparams`` of llama.cpp's
src/models/{qwen35,qwen35moe,qwen3next,kimi-linear}.cpp.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.weights.gguf.decoder import decoder_config
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

_INTERVAL = 4  # llama.cpp's default
_DELTA, _FULL = "linear_attention", "full_attention"


def qwen3_5_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Qwen3.5 to 3.8, dense."""
    return _hybrid(meta, dense=True) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
    }


def qwen3_5_moe_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Qwen3.5 to 3.8's mixtures of experts; llama.cpp renormalises the weights of the experts."""
    meta.only("expert_gating_func", 0, 1)  # softmax
    experts = {
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.count("expert_shared_feed_forward_length"),
    }
    return (
        _hybrid(meta, dense=False)
        | experts
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe",
            "norm_topk_prob": True,
        }
    )


def qwen3_next_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Qwen3-Next, as a mixture of Qwen3.5, which computes the same.

    Hugging Face's Qwen3-Next has queries, keys, values and gates in one tensor. A file has two,
    which may be quantised in different ways, as Qwen3.5 does.
    """
    return qwen3_5_moe_config(meta)


def _hybrid(meta: ArchitectureMetadata, *, dense: bool) -> dict[str, Any]:
    meta.only("tensor_data_layout", "reference")
    meta.only("attention.sliding_window", 0)
    config = decoder_config(meta, partial=True, dense=dense)
    if meta.architecture != "qwen3next":
        # Frequencies whose position is the time, height and width of an image, in turn: equal for
        # text. llama.cpp rotates the remaining ones by another position.
        half = round(config["head_dim"] * config["partial_rotary_factor"]) // 2
        meta.only("rope.dimension_sections", [*((half + 2 - i) // 3 for i in range(3)), 0])
    return config | {"layer_types": _layer_types(meta), **_delta(meta)}


def _layer_types(meta: ArchitectureMetadata) -> list[str]:
    """The mixer of each layer: by a list of those with a state, or else every so many attend."""
    interval, key = meta.count("full_attention_interval", _INTERVAL), "attention.recurrent_layers"
    stored = meta.flags(key)
    if stored is None:
        stored = [bool((i + 1) % interval) for i in range(meta.num_layers)]
    elif len(stored) != meta.count("block_count"):
        meta.refuse(key, stored, "must hold true or false for each block")
    return [_DELTA if one else _FULL for one in stored[: meta.num_layers]]


def _delta(meta: ArchitectureMetadata) -> dict[str, Any]:
    """The sizes of the gated delta rule."""
    keys, values = meta.count("ssm.group_count"), meta.count("ssm.time_step_rank")
    inner = meta.count("ssm.inner_size")
    if values % keys:
        words = f"must be a multiple of ssm.group_count, which is {keys}"
        meta.refuse("ssm.time_step_rank", values, words)
    if inner % values:
        words = f"must be a multiple of ssm.time_step_rank, which is {values}"
        meta.refuse("ssm.inner_size", inner, words)
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": meta.count("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": meta.count("ssm.conv_kernel"),
    }


def kimi_linear_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Kimi Linear: a layer without kv heads has the delta rule, the others attend over latents.

    llama.cpp reads neither the widths of heads that have no names of their own nor the base of the
    rope, as nothing rotates, and renormalises the weights of the experts.
    """
    for key in ("attention.key_length", "attention.value_length", "rope.freq_base"):
        meta.skip(key)
    heads, rope_dim = meta.count("attention.head_count"), meta.count("rope.dimension_count")
    key_dim = meta.count("attention.key_length_mla")
    if key_dim <= rope_dim:
        words = f"must exceed rope.dimension_count, which is {rope_dim}"
        meta.refuse("attention.key_length_mla", key_dim, words)
    meta.only("hidden_activation", "silu", "swish")
    numbered = list(enumerate(meta.counts("attention.head_count_kv")[: meta.num_layers], 1))
    section = {
        "kda_layers": [i for i, kv_heads in numbered if not kv_heads],
        "full_attn_layers": [i for i, kv_heads in numbered if kv_heads],
        "num_heads": heads,
        "head_dim": meta.count("kda.head_dim"),
        "short_conv_kernel_size": meta.count("ssm.conv_kernel"),
    }
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": meta.count("embedding_length"),
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "q_lora_rank": meta.count_if_set("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": meta.count("attention.value_length_mla"),
        "model_max_length": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "linear_attn_config": section,
        **_kimi_experts(meta),
    }


def _kimi_experts(meta: ArchitectureMetadata) -> dict[str, Any]:
    meta.only("expert_gating_func", 2)  # sigmoid
    meta.only("expert_weights_norm", True)
    return {
        "first_k_dense_replace": meta.count_if_set("leading_dense_block_count", 0),
        "num_experts": meta.count("expert_count"),
        "num_experts_per_token": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "num_shared_experts": meta.count_if_set("expert_shared_count", 0),
        "routed_scaling_factor": meta.number_if_set("expert_weights_scale") or 1.0,
        "moe_renormalize": True,
        "num_expert_group": meta.count_if_set("expert_group_count", 1),
        "topk_group": meta.count_if_set("expert_group_used_count", 1),
    }
