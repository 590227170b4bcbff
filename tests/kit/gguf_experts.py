"""Tiny mixtures of experts and models with latent attention, and GGUF files of them.

Owns: the configs, the cases that are compared with llama.cpp, and their tokens. Run as a program,
it writes the files into a folder for ``golden/make_gguf.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from jaxinfer.models.registry import build_model
from kit.checkpoints import (
    HFConfig,
    random_hf_tensors,
    tiny_llama_config,
    tiny_qwen3_moe_config,
    write_gguf,
)

TOKEN_IDS = np.random.default_rng(0).integers(3, 95, 100).astype(np.int32)  # int32[100]
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": tiny_qwen3_moe_config(),
    "mixtral": tiny_llama_config(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=5,
        num_experts_per_tok=2,
    ),
    "gpt_oss": tiny_llama_config(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        head_dim=32,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_scaling=YARN | {"truncate": False},
        attention_bias=True,
    ),
    "deepseek_v2": tiny_llama_config(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", **DEEPSEEK
    ),
    "deepseek_v3": tiny_llama_config(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        **DEEPSEEK
        | {
            "q_lora_rank": 32,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_group": 3,
            "topk_group": 2,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
# llama.cpp has one epsilon for all norms, rounds the bounds of YaRN's ramp, and takes a DeepSeek
# without latent queries for V2-Lite only if it has that model's number of layers.
_AS_LLAMA_CPP = {
    "gpt_oss": {"rope_scaling": {"rope_type": "default"}, "tie_word_embeddings": False},
    "deepseek_v2": {"rms_norm_eps": 1e-6, "q_lora_rank": 32},
    "deepseek_v3": {"rms_norm_eps": 1e-6},
}
# The same files with kv_b in one tensor, as they were written at first.
_OLDER = ("deepseek_v2_older",)
CASES = (*CONFIGS, *_OLDER)


def write_case(folder: Path, name: str) -> Path:
    """The GGUF file of one case, with weights large enough for every part to have an effect."""
    family = name.removesuffix("_older")
    config: HFConfig = {**CONFIGS[family], **_AS_LLAMA_CPP.get(family, {})}
    tensors = random_hf_tensors(build_model(config, "float32"))
    larger = {
        key: 1 + value if "norm" in key else 3 * value if value.ndim > 1 else value
        for key, value in tensors.items()
    }
    return write_gguf(folder / f"{name}.gguf", config, larger, older=name in _OLDER)


if __name__ == "__main__":
    for case in CASES:
        write_case(Path(sys.argv[1]), case)
    np.save(Path(sys.argv[1]) / "token_ids.npy", TOKEN_IDS)
