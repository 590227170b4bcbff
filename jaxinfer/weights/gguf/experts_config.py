"""Readers of metadata for single families of mixtures of experts: DBRX, MiMo-V2 and Step 3.5.

Source: llama.cpp's src/models/{dbrx,mimo2,step35}.cpp, and its converters of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.weights.gguf.families import WINDOWED, windows
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
    names = ("num_key_value_heads", "swa_num_key_value_heads")
    heads = _of_kinds(meta, "attention.head_count_kv", kv_heads, windowed, names)
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


def _of_kinds(
    meta: ArchitectureMetadata,
    key: str,
    numbers: Sequence[int],
    windowed: Sequence[bool],
    names: tuple[str, str],
) -> dict[str, int]:
    """The number of layers without a window and that of layers with one, under their names."""
    found: dict[str, int] = {}
    for name, kind in zip(names, (False, True), strict=True):
        own = {n for n, one in zip(numbers, windowed, strict=True) if one == kind}
        if len(own) > 1:
            words = "must be the same in all layers with a window, and in all others"
            meta.refuse(key, list(numbers), words)
        found |= {name: own.pop()} if own else {}
    return found


def step35_layers(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Step 3.5: which layers have windows, and experts; heads and ropes of both kinds, and limits.

    Half of a head rotates in layers without a window, which llama.cpp knows.
    """
    count, read = meta.num_layers, dict(windows(4)(meta))
    windowed = [kind == WINDOWED for kind in read["layer_types"]]
    key, names = "attention.head_count", ("num_attention_heads", "num_sliding_attention_heads")
    read |= _of_kinds(meta, key, meta.each(key)[:count], windowed, names)
    for name in ("exp", "shexp"):
        stored = f"swiglu_clamp_{name}"
        if meta.has(stored):
            shared = "_shared" * (name == "shexp")
            read[f"swiglu_limits{shared}"] = meta.numbers(stored)[:count]
    sparse = [i for i in range(count) if meta.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    theta = meta.number("rope.freq_base", 10000.0)
    return {
        "num_attention_heads": max(meta.each(key)),
        **read,
        "moe_layers_enum": sparse,
        "partial_rotary_factors": [1.0 if one else 0.5 for one in windowed],
        "local_rope_theta": meta.number("rope.freq_base_swa", theta),
    }


def m3_keys(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """MiniMax-M3: layers after the dense ones have experts and an indexer."""
    meta.only("expert_shared_count", 1)
    meta.only("expert_weights_norm", True)
    dense, start = meta.count_if_set("leading_dense_block_count", 0), "attention.indexer."
    sparse = [int(i >= dense) for i in range(meta.num_layers)]
    indexer = {
        "sparse_num_index_heads": meta.count(f"{start}head_count"),
        "sparse_index_dim": meta.count(f"{start}key_length"),
        "sparse_topk_blocks": meta.count(f"{start}top_k"),
        "sparse_block_size": meta.count(f"{start}block_size"),
        "sparse_local_block": meta.count_if_set(f"{start}local_blocks", 0),
    }
    return {
        "num_experts_per_tok": meta.count("expert_used_count"),
        "shared_intermediate_size": meta.count("expert_feed_forward_length"),
        "dense_intermediate_size": meta.count("feed_forward_length"),
        "routed_scaling_factor": meta.number_if_set("expert_weights_scale") or 1.0,
        "moe_layer_freq": sparse,
        "sparse_attention_config": {**indexer, "sparse_attention_freq": sparse},
    }
