"""Tiny decoders with the gated delta rule, and GGUF files of them.

Owns: the configs, the cases that are compared with llama.cpp, and their tokens. Run as a program,
it writes the files into a folder for ``golden/make_gguf.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from jaxinfer.models.registry import build_model
from kit.checkpoints import HFConfig, random_hf_tensors, tiny_llama_config, write_gguf

TOKEN_IDS = np.random.default_rng(0).integers(3, 95, 100).astype(np.int32)  # int32[100]
# Three value heads of each of two key heads. Widths are equal, as llama.cpp requires.
_HYBRID = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-6,
}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}


def tiny_qwen3_5_config(**changes: object) -> HFConfig:
    """A layer with the gated delta rule, and one with attention."""
    names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}
    return tiny_llama_config() | names | _HYBRID | {"rope_scaling": _SECTIONS} | changes


def tiny_qwen3_5_moe_config(**changes: object) -> HFConfig:
    """The same with five experts, and one for all tokens."""
    names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe"}
    config = tiny_qwen3_5_config() | names | _EXPERTS | {"tie_word_embeddings": False} | changes
    del config["intermediate_size"]  # as in published ones
    return config


def tiny_qwen3_next_config(**changes: object) -> HFConfig:
    """The same as a Qwen3-Next."""
    names = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    return tiny_llama_config() | names | _HYBRID | _EXPERTS | {"norm_topk_prob": True} | changes


CONFIGS = {
    "qwen35": tiny_qwen3_5_config(),
    "qwen35moe": tiny_qwen3_5_moe_config(
        num_hidden_layers=3, layer_types=["full_attention", *["linear_attention"] * 2]
    ),
    "qwen3next": tiny_qwen3_next_config(),
}
# The same file with the inputs of the delta rule in one tensor, as it was written at first.
_OLDER = ("qwen3next_older",)
CASES = (*CONFIGS, *_OLDER)


def write_case(folder: Path, name: str) -> Path:
    """The GGUF file of one case, with weights large enough for every part to have an effect."""
    config = CONFIGS[name.removesuffix("_older")]
    tensors = random_hf_tensors(build_model(config, "float32"))
    larger = {key: 3 * value if value.ndim > 1 else value for key, value in tensors.items()}
    return write_gguf(folder / f"{name}.gguf", config, larger, older=name in _OLDER)


if __name__ == "__main__":
    for case in CASES:
        write_case(Path(sys.argv[1]), case)
    np.save(Path(sys.argv[1]) / "token_ids.npy", TOKEN_IDS)
