"""GGUF files of several architectures, as llama.cpp's converter writes them.

Source: ``conversion/{deepseek,gpt_oss,phi,glm,base}.py`` of ggml-org/llama.cpp; the names of
tensors are those of the ``gguf`` package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np

type Tensors = Iterator[tuple[str, np.ndarray]]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}


def converted(
    name: str, tensor: np.ndarray, config: Mapping[str, Any], older: bool = False
) -> Tensors:
    """The tensors, with names that ``gguf`` knows, that a tensor of Hugging Face becomes.

    ``older``: as before DeepSeek's attention was computed over latents.
    """
    if name.endswith("kv_b_proj.weight") and not older:
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("self_attn.sinks"):
        yield f"{name}.weight", tensor
    elif config["model_type"] == "gpt_oss" and ".mlp.experts." in name:
        yield from _stack_of_gpt_oss(name, tensor)
    else:
        yield name, tensor


def _stack_of_gpt_oss(name: str, tensor: np.ndarray) -> Tensors:
    stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    outputs_second = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if stem.endswith("down_proj"):
        yield f"{stem}.{kind}", outputs_second
        return
    for i, half in enumerate(("gate_proj", "up_proj")):
        yield f"{stem.replace('gate_up_proj', half)}.{kind}", outputs_second[:, i::2]


def rope_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors with the factors of LongRoPE, by their names in the file."""
    scaling = config.get("rope_scaling") or {}
    return {
        f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
        if f"{kind}_factor" in scaling
    }


def write_experts_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys of experts; those of DeepSeek are optional where its converter says so."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in config:
            writer.add_expert_count(config[key])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if "n_routed_experts" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
        is_sigmoid = config["scoring_func"] == "sigmoid"
        gating = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(gating.SIGMOID if is_sigmoid else gating.SOFTMAX)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def write_heads_config(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], older: bool = False
) -> None:
    """The keys of heads, and of a YaRN rope; ``older``: see ``converted``."""
    if "kv_lora_rank" not in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    else:
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        key_dim, value_dim = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
        writer.add_kv_lora_rank(rank)
        if config["q_lora_rank"] is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_rope_dimension_count(rope_dim)
        writer.add_head_count_kv(config["num_attention_heads"] if older else 1)
        writer.add_key_length(key_dim if older else rank + rope_dim)
        writer.add_value_length(value_dim if older else rank)
        if not older:
            writer.add_key_length_mla(key_dim)
            writer.add_value_length_mla(value_dim)
    if "partial_rotary_factor" in config:
        rotated = int(config["partial_rotary_factor"] * config["head_dim"])
        writer.add_rope_dimension_count(rotated)
    if config["model_type"] == "phi3":  # 0 without a window
        writer.add_sliding_window(config["sliding_window"] or 0)
    scaling = config.get("rope_scaling") or {}
    if "long_factor" in scaling:
        longest, original = (
            config["max_position_embeddings"],
            scaling["original_max_position_embeddings"],
        )
        writer.add_rope_scaling_orig_ctx_len(original)
        log = math.log(longest / original) / math.log(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + log))
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
