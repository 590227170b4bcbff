"""Readers of metadata for single families of mixtures of experts: DBRX and MiMo-V2.

Source: llama.cpp's src/models/{dbrx,mimo2}.cpp, and its converters of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.weights.gguf.metadata import ArchitectureMetadata


def dbrx_sections(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """The sections of attention and of experts, whose weights llama.cpp renormalises."""
    heads = meta.count("attention.head_count")
    return {
        "attn_config": {
            "clip_qkv": meta.number("attention.clamp_kqv"),
            "kv_n_heads": meta.count("attention.head_count_kv", heads),
            "rope_theta": meta.number("rope.freq_base", 10000.0),
        },
        "ffn_config": {
            "ffn_hidden_size": meta.count("feed_forward_length"),
            "moe_num_experts": meta.count("expert_count"),
            "moe_top_k": meta.count("expert_used_count"),
            "moe_normalize_expert_weights": 1.0,
        },
    }


def mimo2_layers(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """MiMo-V2: which layers have windows, and experts; KV heads and ropes of both kinds.

    The window leaves out the token itself, as in the model's own code; llama.cpp counts it.
    """
    count, key = meta.num_layers, "attention.sliding_window_pattern"
    pattern, kv_heads = meta.pattern(key), meta.counts("attention.head_count_kv")[:count]
    if not isinstance(pattern, list) or len(pattern) < count:
        meta.refuse(key, pattern, "must hold true or false for each block")
    windowed = pattern[:count]
    heads: dict[str, int] = {}
    for name, kind in (("num_key_value_heads", False), ("swa_num_key_value_heads", True)):
        own = {n for n, one in zip(kv_heads, windowed, strict=True) if one == kind}
        if len(own) > 1:
            words = "must be the same in all layers with a window, and in all others"
            meta.refuse("attention.head_count_kv", kv_heads, words)
        heads |= {name: own.pop()} if own else {}
    layers = (f"blk.{i}.ffn_gate_inp.weight" for i in range(count))
    return {
        "num_key_value_heads": max(kv_heads),
        **heads,
        "hybrid_layer_pattern": [int(one) for one in windowed],
        "moe_layer_freq": [int(meta.has_tensor(name)) for name in layers],
        "sliding_window_size": meta.count("attention.sliding_window"),
        "v_head_dim": meta.count("attention.value_length"),
        "attention_value_scale": meta.number_if_set("attention.value_scale") or None,
        "swa_rope_theta": meta.number("rope.freq_base_swa", meta.number("rope.freq_base", 10000.0)),
    }
