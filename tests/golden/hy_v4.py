"""Published names of Hunyuan 4's tensors, which transformers reads and does not write."""

from __future__ import annotations

import re

import torch

_NAMES = (
    (r"\.self_attn\.gate_proj\.", ".self_attn.linear_gate."),
    (r"\.self_attn\.sinks$", ".self_attn.learnable_sink_param"),
    (r"\.attn_hc\.", ".hc_attn_layer.hc_pre.hc_"),
    (r"\.ffn_hc\.", ".hc_mlp_layer.hc_pre.hc_"),
    (r"\.hc_head\.hc_", ".hc_head.hc_head_"),
)


def published_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as files have them, with the experts of a layer in two."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, published in _NAMES:
            name = re.sub(pattern, published, name)
        found[name] = tensor
    return found
