"""Published names of DeepSeek-V4's tensors, some of which transformers reads and does not write."""

from __future__ import annotations

import re

import torch

_NAMES = (
    (r"^lm_head\.", "head."),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.sinks$", ".attn.attn_sink"),
    (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".attn.w\1."),
    (r"\.self_attn\.", ".attn."),
    (r"\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.indexer\.compressor\.wq_b\.", ".indexer.wq_b."),
    (r"\.compressor\.scorer\.", "."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
    *((rf"\.shared_experts\.{n}_proj\.", f".shared_experts.{w}.") for n, w in (
        ("gate", "w1"), ("up", "w3"), ("down", "w2"),
    )),
)  # fmt: skip


def published_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as files have them, with three of each expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, published in _NAMES:
            name = re.sub(pattern, published, name)
        layer, _, kind = name.partition(".experts.")
        if kind:
            parts = {"w2": tensor}
            if kind == "gate_up_proj":
                parts = dict(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
            for part, stack in parts.items():
                for expert, own in enumerate(stack):
                    found[f"{layer}.experts.{expert}.{part}.weight"] = own.clone()
        else:
            found[name] = tensor
    return found
