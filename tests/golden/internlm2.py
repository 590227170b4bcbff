"""InternLM 2's tensors from Llama's, which compute the same, and back.

Source: the published ``modeling_internlm2.py``, whose wqkv holds of each KV head its queries, its
key and its value.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_PACKED = "attention.wqkv"
_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


def packed(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The tensors under InternLM 2's names."""
    kv, made = config.num_key_value_heads, {}
    for key, tensor in tensors.items():
        if _QKV[0] in key:
            parts = (tensors[key.replace(_QKV[0], one)] for one in _QKV)
            heads = [one.reshape(kv, -1, *tensor.shape[1:]) for one in parts]
            made[key.replace(_QKV[0], _PACKED)] = torch.cat(heads, 1).reshape(-1, *tensor.shape[1:])
        elif _QKV[1] not in key and _QKV[2] not in key:
            made[_renamed(key, _NAMES)] = tensor
    return made


def unpacked(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The tensors under Llama's names."""
    back, made = {there: here for here, there in _NAMES.items()}, {}
    kv, heads = config.num_key_value_heads, config.num_attention_heads
    for key, tensor in tensors.items():
        if _PACKED not in key:
            made[_renamed(key, back)] = tensor
            continue
        width = config.head_dim
        own = tensor.reshape(kv, -1, *tensor.shape[1:])
        parts = own.split([heads // kv * width, width, width], dim=1)
        for name, part in zip(_QKV, parts, strict=True):
            made[key.replace(_PACKED, name)] = part.reshape(-1, *tensor.shape[1:]).contiguous()
    return made


def _renamed(key: str, names: dict[str, str]) -> str:
    for one, other in names.items():
        key = re.sub(rf"(^|\.){re.escape(one)}\.", rf"\g<1>{other}.", key)
    return key
