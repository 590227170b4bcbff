"""The tables of decoders with the gated delta rule.

Source: the conversion scripts of llama.cpp (``convert_hf_to_gguf.py``, later ``conversion/``), read
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxinfer.weights.gguf.names import Layout, NameTable
from jaxinfer.weights.gguf.names_dense import DECODER
from jaxinfer.weights.gguf.names_experts import DEEPSEEK, EXPERTS

_MOE = "block_sparse_moe."
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
    DECODER,
    layer={
        **{stem: name for stem, name in DECODER.layer.items() if stem != "ffn_norm"},
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
    is_delta=True,
    tiled=True,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    layer={
        **_QWEN3_5.layer,
        **EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    layouts={**_HYBRID_LAYOUTS, "ffn_gate_inp_shexp": "row"},
)
# With Qwen3.5's names: see ``hybrid_config.qwen3_next_config``.
QWEN3_NEXT = replace(
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
    DEEPSEEK,
    layer={
        **DEEPSEEK.layer,
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
    is_delta=True,
)
DELTA_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5_MOE,
        "kimi_linear": _KIMI_LINEAR,
    }
)
