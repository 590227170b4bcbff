"""Builds the configs of decoders without rope from GGUF metadata.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's
src/models/{gpt2,starcoder,bloom,mpt}.cpp.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.weights.gguf.families import REFERENCE
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

_ALIBI = 8.0  # the largest bias, of all published models


def gpt2_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """GPT-2."""
    return _like_gpt2(meta) | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
    }


def starcoder_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """StarCoder 1 (GPT-BigCode), with one KV head."""
    return _like_gpt2(meta, kv_heads=1) | {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    }


def bloom_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """BLOOM; llama.cpp's ALiBi has a constant, which some files hold as well."""
    meta.only("attention.max_alibi_bias", _ALIBI)
    heads, width = _sizes(meta)
    meta.only("feed_forward_length", 4 * width)
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": width,
        "n_layer": meta.num_layers,
        "n_head": heads,
        "seq_length": meta.count("context_length"),
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
    }


def mpt_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """MPT with ALiBi, whose queries, keys and values may be limited."""
    heads, width = _sizes(meta)
    meta.only("feed_forward_length", 4 * width)
    most = meta.number("attention.max_alibi_bias")
    limit = meta.number_if_set("attention.clamp_kqv")
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": width,
        "n_layers": meta.num_layers,
        "n_heads": heads,
        "max_seq_len": meta.count("context_length"),
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": most, "clip_qkv": limit},
    }


def _like_gpt2(meta: ArchitectureMetadata, kv_heads: int | None = None) -> dict[str, Any]:
    heads, width = _sizes(meta, kv_heads)
    meta.only("hidden_activation", "gelu_new", "gelu_pytorch_tanh")
    return {
        "n_embd": width,
        "n_inner": meta.count("feed_forward_length", 4 * width),
        "n_layer": meta.num_layers,
        "n_head": heads,
        "n_positions": meta.count("context_length"),
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
    }


def _sizes(meta: ArchitectureMetadata, kv_heads: int | None = None) -> tuple[int, int]:
    """The number of heads, and the width; ``kv_heads``: the only number of these.

    Raises ``CheckpointError`` for heads of another width, and for a scale or a window.
    """
    heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
    if width % heads:
        meta.refuse("attention.head_count", heads, f"must divide embedding_length, {width}")
    for key in ("attention.key_length", "attention.value_length"):
        meta.only(key, width // heads)
    meta.only("attention.head_count_kv", kv_heads or heads)
    meta.only("attention.scale", 0, (width // heads) ** -0.5)
    meta.only("attention.sliding_window", 0)
    meta.only("tensor_data_layout", REFERENCE)
    return heads, width
