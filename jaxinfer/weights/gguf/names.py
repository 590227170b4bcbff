"""The Hugging Face names of GGUF's tensors, and the differences between their layouts.

Owns: one ``NameTable`` per GGUF architecture. Source: the conversion scripts of llama.cpp
(``convert_hf_to_gguf.py``), read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from jaxinfer.core.errors import CheckpointError

_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # not a weight of the model: ``rope`` makes a config of it


@dataclass(frozen=True)
class NameTable:
    """Stems without ``.weight`` and ``.bias``; a layer's stems follow ``blk.<i>.``.

    A name with {} is that of each expert, by its number; the file stacks the experts of a layer.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str
    # stems whose rows are permuted for interleaved rope, with the config key of their heads
    interleaved: Mapping[str, str] = MappingProxyType({})
    transposed: tuple[str, ...] = ()  # stems of weights that Hugging Face stores [in, out]


_NORMS_BEFORE = ("attn_norm", "ffn_norm")
_DECODER = NameTable(
    model={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    layer_prefix="model.layers.",
)
_LLAMA = replace(
    _DECODER, interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
)
_OLMO2 = replace(
    _DECODER,
    layer={stem: name for stem, name in _DECODER.layer.items() if stem not in _NORMS_BEFORE}
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_QWEN3_MOE = replace(
    _DECODER,
    layer={
        **_DECODER.layer,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
)
_GPT2 = NameTable(
    model={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layer_prefix="transformer.h.",
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
NAME_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _DECODER,
        "qwen3": _DECODER,
        "qwen3moe": _QWEN3_MOE,
        "olmo2": _OLMO2,
        "gpt2": _GPT2,
    }
)


def map_name(table: NameTable, gguf_name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and its stem.

    Raises ``CheckpointError`` for a tensor the architecture does not have.
    """
    match = _GGUF_NAME.fullmatch(gguf_name)
    index, stem, kind = match.groups() if match else (None, "", "")
    prefix = "" if index is None else f"{table.layer_prefix}{index}."
    stems = table.model if index is None else table.layer
    if stem not in stems:
        raise CheckpointError(
            f"tensor {gguf_name} has no place in this architecture; the file was made for a "
            "variant that jaxinfer does not support"
        )
    return f"{prefix}{stems[stem]}.{kind}", stem


def undo_interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:  # [heads * H, ...] -> same
    """Reorder each head's rows from adjacent pairs 0, H/2, 1, H/2 + 1, ... to 0, 1, ..., H - 1."""
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)
