"""GGUF files of several architectures, as llama.cpp's converter writes them.

Source: ``conversion/{deepseek,gpt_oss,phi,glm,qwen,base}.py`` of ggml-org/llama.cpp; the names of
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
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "exaone": gguf.MODEL_ARCH.EXAONE,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
# The ends of names of tensors that are never quantised, besides vectors.
FLOAT32 = (".bias", "ssm_conv1d.weight", "ffn_gate_inp_shexp.weight")


def converted(
    name: str, tensor: np.ndarray, config: Mapping[str, Any], older: bool = False
) -> Tensors:
    """The tensors, with names that ``gguf`` knows, that a tensor of Hugging Face becomes.

    ``older``: as before DeepSeek's attention was computed over latents, and with Qwen3-Next's
    inputs of the delta rule in one tensor.
    """
    if "linear_num_key_heads" in config:
        yield from _of_hybrid(name, tensor, config, older)
        return
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


def _of_hybrid(name: str, tensor: np.ndarray, config: Mapping[str, Any], older: bool) -> Tensors:
    """A tensor of Qwen3.5, whose value heads are tiled, or of Qwen3-Next, where they are not."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    stem, each = name.rpartition("linear_attn.")[2], values // keys
    if stem in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
        if older or stem == "in_proj_ba.weight":
            yield name, tensor
            return
        of_head = tensor.reshape(keys, -1, tensor.shape[1])
        parts = np.split(of_head, np.cumsum((k_dim, k_dim, each * v_dim)), axis=1)
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name.replace("qkvz", "z"), z
        return
    if config["model_type"] != "qwen3_next":
        tensor = _with_tiled_heads(stem, tensor, (keys, each), 2 * keys * k_dim)
    if stem == "A_log":
        tensor = -np.exp(tensor)
    elif stem == "dt_bias":
        name = name.replace("dt_bias", "dt_proj.bias")
    elif stem == "conv1d.weight":
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and stem != "norm.weight":
        tensor = tensor + 1
    yield name, tensor


def _with_tiled_heads(
    stem: str, tensor: np.ndarray, heads: tuple[int, int], num_keys: int
) -> np.ndarray:
    """The tensor with the first value head of each of the key heads, then the second of each, ...

    ``heads``: key heads, and value heads of each; ``num_keys``: rows of queries and keys.
    """

    def tiled(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*heads, -1).swapaxes(0, 1).reshape(rows.shape)

    if stem in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([tensor[:num_keys], tiled(tensor[num_keys:])])
    if stem == "out_proj.weight":
        return tiled(tensor.T).T
    of_heads = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
    return tiled(tensor) if stem in of_heads else tensor


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


def write_hybrid_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys of decoders with the gated delta rule."""
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if "layer_types" in config:
        is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_recurrent)
    if "mrope_section" in (config.get("rope_scaling") or {}):
        writer.add_rope_dimension_sections([*config["rope_scaling"]["mrope_section"], 0])
    if "shared_expert_intermediate_size" in config:
        width = config["shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(width)


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
