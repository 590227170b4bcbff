"""Nemotron-NAS as transformers' Llama whose layers are changed: KV heads and a width of each, or no
attention, or no network.

Source: the published ``modeling_decilm.py``.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 6.0}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"intermediate_size": 48}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"intermediate_size": 40}},
]
WIDTHS = [256, 48, None, None, 40]  # 2 * 6 * 32 / 3 = 128, up to a multiple of 256


class NoBlock(torch.nn.Module):
    """Adds nothing to the stream, as attention or as a network."""

    def __init__(self, *, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        made = torch.zeros_like(hidden_states)
        return (made, None) if self.is_attention else made


def change(model: torch.nn.Module) -> None:
    """Give the layers of a Llama these blocks."""
    for i, layer in enumerate(model.model.layers):
        config = deepcopy(model.config)
        if (group := BLOCKS[i]["attention"].get("n_heads_in_group")) is None:
            layer.self_attn = NoBlock(is_attention=True)
            layer.input_layernorm = torch.nn.Identity()
        else:
            config.num_key_value_heads = config.num_attention_heads // group
            layer.self_attn = LlamaAttention(config, i)
        if WIDTHS[i] is None:
            layer.mlp = NoBlock(is_attention=False)
            layer.post_attention_layernorm = torch.nn.Identity()
        else:
            config.intermediate_size = WIDTHS[i]
            layer.mlp = LlamaMLP(config)
    model.eval()
