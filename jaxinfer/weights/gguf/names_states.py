"""The tables of decoders with state spaces or short convolutions.

Source: the conversion scripts of llama.cpp (``convert_hf_to_gguf.py``, later ``conversion/``), read
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxinfer.weights.gguf.names import Joined, Layout, NameTable
from jaxinfer.weights.gguf.names_dense import DECODER, LLAMA
from jaxinfer.weights.gguf.names_experts import GRANITE_EXPERTS, GRANITE_LAYER

_ATTENTION = MappingProxyType(
    {
        **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
        "attn_output": "self_attn.o_proj",
    }
)
_NETWORK = MappingProxyType(
    {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
)
_STATE_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"ssm_a": "log_rates", "ssm_conv1d.weight": "conv"}
)
_STATE_LAYOUTS_2: Mapping[str, Layout] = MappingProxyType(
    {**_STATE_LAYOUTS, "ssm_d": "flat", "ssm_norm": "flat"}
)


def _mixer(prefix: str) -> dict[str, str]:
    """The tensors of a state space."""
    return {
        "ssm_in": f"{prefix}in_proj",
        "ssm_conv1d": f"{prefix}conv1d",
        "ssm_x": f"{prefix}x_proj",
        "ssm_dt": f"{prefix}dt_proj",
        "ssm_norm": f"{prefix}norm",
        "ssm_out": f"{prefix}out_proj",
    }


def _bare(prefix: str) -> dict[str, str]:
    return {"ssm_a": f"{prefix}A_log", "ssm_d": f"{prefix}D"}


def _bare_2(prefix: str) -> dict[str, str]:
    return {**_bare(prefix), "ssm_dt.bias": f"{prefix}dt_bias"}


_MAMBA = NameTable(
    model={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    layer={"attn_norm": "norm", **_mixer("mixer.")},
    layer_prefix="backbone.layers.",
    bare=_bare("mixer."),
    layouts=_STATE_LAYOUTS,
)
_MAMBA2 = replace(_MAMBA, bare=_bare_2("mixer."), layouts=_STATE_LAYOUTS_2)
_FALCON_H1 = replace(
    DECODER,
    model={**DECODER.model, "output_norm": "model.final_layernorm"},
    layer={
        "attn_norm": "input_layernorm",
        **_ATTENTION,
        **_mixer("mamba."),
        "ffn_norm": "pre_ff_layernorm",
        **_NETWORK,
    },
    bare={**_bare_2("mamba."), "ffn_norm": "pre_ff_layernorm.weight"},
    layouts=_STATE_LAYOUTS_2,
)
_GRANITE_HYBRID = replace(
    LLAMA,
    layer={
        "attn_norm": "input_layernorm",
        **_ATTENTION,
        **_mixer("mamba."),
        "ffn_norm": "post_attention_layernorm",
        **GRANITE_LAYER,
        "ffn_down": "shared_mlp.output_linear",  # of models without experts
    },
    bare=_bare_2("mamba."),
    layouts=_STATE_LAYOUTS_2,
    joined=(
        *GRANITE_EXPERTS,
        Joined("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight"), "rows"),
    ),
)
_NEMOTRON_H = replace(
    _MAMBA2,
    layer={
        **_MAMBA2.layer,
        **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    bare={**_MAMBA2.bare, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
)
_JAMBA = replace(
    DECODER,
    model={**DECODER.model, "output_norm": "model.final_layernorm"},
    layer={
        "attn_norm": "input_layernorm",
        **_ATTENTION,
        **_mixer("mamba."),
        "ssm_dt_norm": "mamba.dt_layernorm",
        "ssm_b_norm": "mamba.b_layernorm",
        "ssm_c_norm": "mamba.c_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        **_NETWORK,
        "ffn_gate_inp": "feed_forward.router",
        **{f"{stem}_exps": name.replace("d.", "d.experts.{}.") for stem, name in _NETWORK.items()},
    },
    bare=_bare("mamba."),
    layouts=_STATE_LAYOUTS,
)
_LFM2 = replace(
    DECODER,
    model={
        **DECODER.model,
        "output_norm": "model.embedding_norm",
        "token_embd_norm": "model.embedding_norm",  # of older files
    },
    layer={
        "attn_norm": "operator_norm",
        **_ATTENTION,
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    layouts={"shortconv.conv.weight": "conv"},
)
# by the model_type of config.json
STATE_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "mamba": _MAMBA,
        "falcon_mamba": _MAMBA,
        "mamba2": _MAMBA2,
        "falcon_h1": _FALCON_H1,
        "granitemoehybrid": _GRANITE_HYBRID,
        "nemotron_h": _NEMOTRON_H,
        "jamba": _JAMBA,
        "lfm2": _LFM2,
        "lfm2_moe": _LFM2,
    }
)
