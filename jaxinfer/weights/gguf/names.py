"""The Hugging Face names of GGUF's tensors, and the differences between their layouts.

Owns: one ``NameTable`` for each family. Source: the conversion scripts of llama.cpp
(``convert_hf_to_gguf.py``, later ``conversion/``), read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError

_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(weight|bias))?")
# Tensors that are no weights of the model: ``rope`` makes a config of them.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


# Layouts of decoders with the gated delta rule, see ``hybrid``.
type Layout = Literal[
    "norm",
    "rates",
    "heads",
    "values",
    "qkv",
    "taps",
    "outputs",
    "row",
    "gates",
    "inputs",
    "channel_rates",
    "channel_taps",
]


class Joined(NamedTuple):
    """Tensors of a layer in the file that are one tensor of Hugging Face: see ``stored``."""

    name: str
    parts: tuple[str, ...]
    layout: Literal["keys_and_values", "experts"]


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
    # of a layer's tensors without ".weight" and ".bias" in Hugging Face's names, by full names
    bare: Mapping[str, str] = MappingProxyType({})
    joined: tuple[Joined, ...] = ()
    # of the tensors that ``hybrid`` reads, by stems
    layouts: Mapping[str, Layout] = MappingProxyType({})
    # whether value heads are in the order that ``hybrid.DeltaHeads`` describes
    tiled: bool = False


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
_ARCEE = replace(_LLAMA, layer={k: v for k, v in _LLAMA.layer.items() if k != "ffn_gate"})
_OLMO2 = replace(
    _DECODER,
    layer={stem: name for stem, name in _DECODER.layer.items() if stem not in _NORMS_BEFORE}
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_PHI3 = replace(
    _DECODER,
    layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
_GLM4 = replace(
    _DECODER,
    layer={stem: name for stem, name in _DECODER.layer.items() if stem != "ffn_gate"}
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
)
_EXPERTS = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    }
)
_MOE = "block_sparse_moe."
_QWEN3_MOE = replace(_DECODER, layer={**_DECODER.layer, **_EXPERTS})
_MIXTRAL = replace(
    _LLAMA,
    layer={
        **_DECODER.layer,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
_GPT_OSS = replace(
    _DECODER,
    layer={
        **{stem: name for stem, name in _DECODER.layer.items() if stem != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    bare={"attn_sinks.weight": "self_attn.sinks"},
    joined=(
        Joined(
            "mlp.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts"
        ),
        Joined(
            "mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), "experts"
        ),
        Joined("mlp.experts.down_proj", ("ffn_down_exps.weight",), "experts"),
        Joined("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), "experts"),
    ),
)
_DEEPSEEK = replace(
    _DECODER,
    layer={
        **_DECODER.layer,
        **_EXPERTS,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",  # of older files
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    joined=(
        Joined(
            "self_attn.kv_b_proj.weight",
            ("attn_k_b.weight", "attn_v_b.weight"),
            "keys_and_values",
        ),
    ),
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
_STARCODER = replace(_GPT2, transposed=())
_STARCODER2 = replace(
    _DECODER,
    layer={
        **{stem: name for stem, name in _DECODER.layer.items() if stem != "ffn_gate"},
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)
_SEED_OSS = replace(
    _DECODER,
    layer={
        **{stem: name for stem, name in _DECODER.layer.items() if stem != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    },
)
_EXAONE = replace(
    _GPT2,
    layer={
        "attn_norm": "ln_1",
        **{f"attn_{name}": f"attn.attention.{name}_proj" for name in "qkv"},
        "attn_output": "attn.attention.out_proj",
        "ffn_norm": "ln_2",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    },
    transposed=(),
)
_HYBRID_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        **dict.fromkeys(("attn_norm", "post_attention_norm", "output_norm"), "norm"),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), "norm"),
        "ssm_a": "rates",
        "ssm_dt": "heads",
        "ssm_alpha": "heads",
        "ssm_beta": "heads",
        "attn_gate": "values",
        "attn_qkv": "qkv",
        "ssm_conv1d": "taps",
        "ssm_out": "outputs",
    }
)
_QWEN3_5 = replace(
    _DECODER,
    layer={
        **{stem: name for stem, name in _DECODER.layer.items() if stem != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    bare={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    layouts=_HYBRID_LAYOUTS,
    tiled=True,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    layer={
        **_QWEN3_5.layer,
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    layouts={**_HYBRID_LAYOUTS, "ffn_gate_inp_shexp": "row"},
)
# With Qwen3.5's names: see ``hybrid_config.qwen3_next_config``.
_QWEN3_NEXT = replace(
    _QWEN3_5_MOE,
    layer={
        **_QWEN3_5_MOE.layer,
        "ssm_ba": "linear_attn.in_proj_{}",
        "ssm_in": "linear_attn.in_proj_{}",  # of older files
    },
    layouts={**_QWEN3_5_MOE.layouts, "ssm_ba": "gates", "ssm_in": "inputs"},
    tiled=False,
)
_KIMI_LINEAR = replace(
    _DEEPSEEK,
    layer={
        **_DEEPSEEK.layer,
        "ffn_gate_inp": f"{_MOE}gate",
        "ffn_gate_shexp": f"{_MOE}shared_experts.gate_proj",
        "ffn_up_shexp": f"{_MOE}shared_experts.up_proj",
        "ffn_down_shexp": f"{_MOE}shared_experts.down_proj",
        "ffn_gate_exps": _MOE + "experts.{}.w1",
        "ffn_up_exps": _MOE + "experts.{}.w3",
        "ffn_down_exps": _MOE + "experts.{}.w2",
        "ssm_conv1d_q": "self_attn.q_conv1d",
        "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d",
        "ssm_f_a": "self_attn.f_a_proj",
        "ssm_f_b": "self_attn.f_b_proj",
        "ssm_g_a": "self_attn.g_a_proj",
        "ssm_g_b": "self_attn.g_b_proj",
        "ssm_beta": "self_attn.b_proj",
        "ssm_norm": "self_attn.o_norm",
    },
    bare={
        "exp_probs_b.bias": f"{_MOE}gate.e_score_correction_bias",
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
    },
    layouts={
        "ssm_a": "channel_rates",
        **dict.fromkeys(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), "channel_taps"),
    },
)
# by the model_type of config.json
_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _DECODER,
        "qwen3": _DECODER,
        "qwen3_moe": _QWEN3_MOE,
        "mixtral": _MIXTRAL,
        "gpt_oss": _GPT_OSS,
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "olmo2": _OLMO2,
        "phi3": _PHI3,
        "glm4": _GLM4,
        "gpt2": _GPT2,
        "granite": _LLAMA,
        "smollm3": _LLAMA,
        "arcee": _ARCEE,
        "ernie4_5": _DECODER,
        "exaone": _EXAONE,
        "seed_oss": _SEED_OSS,
        "starcoder2": _STARCODER2,
        "gpt_bigcode": _STARCODER,
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5_MOE,
        "kimi_linear": _KIMI_LINEAR,
    }
)


def table_of(architecture: str, model_type: str) -> NameTable:
    """The table of a GGUF architecture whose config.json has this model_type."""
    return _QWEN3_NEXT if architecture == "qwen3next" else _TABLES[model_type]


class Place(NamedTuple):
    """The place of a GGUF tensor in Hugging Face's checkpoint."""

    name: str  # with {} that of each expert
    stem: str
    joined: Joined | None = None  # the tensor is one part of ``name``


def map_name(table: NameTable, gguf_name: str) -> Place:
    """The place of a GGUF tensor.

    Raises ``CheckpointError`` for a tensor the architecture does not have.
    """
    match = _GGUF_NAME.fullmatch(gguf_name)
    index, stem, kind = match.groups() if match else (None, "", "")
    prefix = "" if index is None else f"{table.layer_prefix}{index}."
    stems = table.model if index is None else table.layer
    own = stem if kind is None else f"{stem}.{kind}"
    in_layer = own if index is not None else ""
    if in_layer in table.bare:
        return Place(prefix + table.bare[in_layer], stem)
    for joined in table.joined:
        if in_layer in joined.parts:
            return Place(prefix + joined.name, stem, joined)
    if stem not in stems or kind is None:
        raise CheckpointError(
            f"tensor {gguf_name} has no place in this architecture; the file was made for a "
            "variant that jaxinfer does not support"
        )
    return Place(f"{prefix}{stems[stem]}.{kind}", stem)


def undo_interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:  # [heads * H, ...] -> same
    """Reorder each head's rows from adjacent pairs 0, H/2, 1, H/2 + 1, ... to 0, 1, ..., H - 1."""
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)
