"""The tables of mixtures of experts, and of latent attention.

Source: the conversion scripts of llama.cpp (``convert_hf_to_gguf.py``, later ``conversion/``), read
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxinfer.weights.gguf.names import Joined, NameTable
from jaxinfer.weights.gguf.names_dense import DECODER, LLAMA, SANDWICH, plus_one

EXPERTS = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    }
)
_QWEN3_MOE = replace(DECODER, layer={**DECODER.layer, **EXPERTS})
_MIXTRAL = replace(
    LLAMA,
    layer={
        **DECODER.layer,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
_GPT_OSS = replace(
    DECODER,
    layer={
        **{stem: name for stem, name in DECODER.layer.items() if stem != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    bare={"attn_sinks.weight": "self_attn.sinks"},
    joined=(
        Joined(
            "mlp.experts.gate_up_proj",
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            "alternating",
        ),
        Joined(
            "mlp.experts.gate_up_proj_bias",
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
            "alternating",
        ),
        Joined("mlp.experts.down_proj", ("ffn_down_exps.weight",), "alternating"),
        Joined("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), "alternating"),
    ),
)
DEEPSEEK = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
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


def _shared(name: str) -> dict[str, str]:
    """The network of all tokens."""
    return {f"ffn_{kind}_shexp": f"{name}.{kind}_proj" for kind in ("gate", "up", "down")}


_MOE = "block_sparse_moe."
_W123 = MappingProxyType(
    {
        "ffn_gate_inp": f"{_MOE}gate",
        "ffn_gate_exps": _MOE + "experts.{}.w1",
        "ffn_up_exps": _MOE + "experts.{}.w3",
        "ffn_down_exps": _MOE + "experts.{}.w2",
    }
)
_QWEN2_MOE = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_expert"),
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
    layouts={"ffn_gate_inp_shexp": "row"},
)
_GLM4_MOE = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_experts"),
        "post_attention_norm": "post_attention_layernorm",
    },
    bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
)
_ERNIE = replace(
    DECODER,
    layer={**DECODER.layer, **EXPERTS, **_shared("mlp.shared_experts")},
    bare={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    layouts={"exp_probs_b.bias": "row"},
)
_HUNYUAN_MOE = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_mlp"),
        "ffn_gate_inp": "mlp.gate.wg",
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
)
_MINIMAX = replace(
    DECODER,
    layer={**DECODER.layer, **_W123},
    bare={"exp_probs_b.bias": f"{_MOE}e_score_correction_bias"},
)
_M3_INDEXER = MappingProxyType(
    {f"indexer.{one}": f"self_attn.index_{one}" for one in ("q_proj", "k_proj", "q_norm", "k_norm")}
)
_MINIMAX_M3 = replace(
    _MINIMAX,
    layer={**_MINIMAX.layer, **_shared(f"{_MOE}shared_experts"), **_M3_INDEXER},
    layouts=plus_one(
        *("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm"),
        *("indexer.q_norm", "indexer.k_norm"),
    ),
)
_AFMOE = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_experts"),
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_gate_inp": "mlp.router.gate",
    },
    bare={"exp_probs_b.bias": "mlp.expert_bias"},
)
# Gates and ups of all experts are in one tensor, and those of the network of all tokens in another.
GRANITE_EXPERTS = (
    Joined(f"{_MOE}input_linear.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts"),
    Joined(f"{_MOE}output_linear.weight", ("ffn_down_exps.weight",), "experts"),
    Joined(
        "shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "rows"
    ),
)
GRANITE_LAYER = MappingProxyType(
    {
        "ffn_gate_inp": f"{_MOE}router.layer",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)
_GRANITE_MOE = replace(LLAMA, layer={**LLAMA.layer, **GRANITE_LAYER}, joined=GRANITE_EXPERTS)
_LAYER_INPUTS = replace(
    DECODER,
    model={
        **DECODER.model,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    layer={
        **SANDWICH,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
)
_GEMMA3N = replace(
    _LAYER_INPUTS,
    model={
        **_LAYER_INPUTS.model,
        "altup_proj": "model.altup_projections.{}",
        "altup_unembd_proj": "model.altup_unembed_projections.{}",
    },
    layer={
        **_LAYER_INPUTS.layer,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    bare={"altup_correct_scale.weight": "altup.correct_output_scale"},
)
_GEMMA4 = replace(
    _LAYER_INPUTS,
    layer={
        **_LAYER_INPUTS.layer,
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.{}.{}_proj",
        "ffn_gate_exps": "experts.{}.gate_proj",
        "ffn_up_exps": "experts.{}.up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
    },
    bare={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    layouts={"ffn_gate_up_exps": "gates_and_ups"},
)
_STEP35 = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **_shared("share_expert"),
        "attn_gate": "self_attn.g_proj",
        "ffn_gate_inp": "moe.gate",
    },
    bare={"exp_probs_b.bias": "moe.router_bias"},
    joined=tuple(
        Joined(f"moe.{kind}_proj.weight", (f"ffn_{kind}_exps.weight",), "experts")
        for kind in ("gate", "up", "down")
    ),
    layouts={
        f"{stem}.weight": "norm"
        for stem in ("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm")
    },
)
_EXAONE_MOE = replace(_ERNIE, bare={"exp_probs_b.bias": "mlp.e_score_correction_bias"}, layouts={})
_LLAMA4 = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **_shared("feed_forward.shared_expert"),
        **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
        "ffn_gate_inp": "feed_forward.router",
    },
    joined=(
        Joined(
            "feed_forward.experts.gate_up_proj",
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            "experts_transposed",
        ),
        Joined("feed_forward.experts.down_proj", ("ffn_down_exps.weight",), "experts_transposed"),
    ),
)
_MISTRAL4 = replace(
    DEEPSEEK,
    layer={**DEEPSEEK.layer, "ffn_gate_up_exps": "mlp.experts.{}.{}_proj"},
    layouts={"ffn_gate_up_exps": "gates_and_ups"},
)
_COHERE2_MOE = replace(
    DECODER,
    layer={
        **{stem: name for stem, name in DECODER.layer.items() if stem != "ffn_norm"},
        **EXPERTS,
        **_shared("mlp.shared_experts"),
    },
)
_HY_V3 = replace(
    DECODER,
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_mlp"),
        "ffn_gate_inp": "mlp.router.gate",
    },
    bare=dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.expert_bias"),
)
_BAILING = replace(
    DECODER,
    model={**DECODER.model, "token_embd": "model.word_embeddings"},
    layer={
        **DECODER.layer,
        **EXPERTS,
        **_shared("mlp.shared_experts"),
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "attn_q_norm": "attention.query_layernorm",
        "attn_k_norm": "attention.key_layernorm",
    },
    bare=dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.gate.expert_bias"),
)
_BAILING_1 = replace(
    _BAILING,
    bare={},
    joined=(
        Joined(
            "attention.query_key_value.weight",
            ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
            "interleaved",
        ),
    ),
)
_DBRX = NameTable(
    model={
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "norm_attn_norm.norm_1",
        "attn_qkv": "norm_attn_norm.attn.Wqkv",
        "attn_output": "norm_attn_norm.attn.out_proj",
        "attn_output_norm": "norm_attn_norm.norm_2",
        "ffn_gate_inp": "ffn.router.layer",
    },
    layer_prefix="transformer.blocks.",
    # of all experts; Hugging Face has the transposes of downs
    bare={
        "ffn_gate_exps.weight": "ffn.experts.mlp.w1",
        "ffn_up_exps.weight": "ffn.experts.mlp.v1",
        "ffn_down_exps.weight": "ffn.experts.mlp.w2",
    },
    layouts={
        "ffn_gate_exps": "experts_rows",
        "ffn_up_exps": "experts_rows",
        "ffn_down_exps": "experts_columns",
    },
)
_MIMO = replace(
    _QWEN3_MOE,
    bare={
        "attn_sinks.weight": "self_attn.attention_sink_bias",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
)
# by the model_type of config.json
EXPERTS_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "qwen3_moe": _QWEN3_MOE,
        "mixtral": _MIXTRAL,
        "dbrx": _DBRX,
        "mimo_v2_flash": _MIMO,
        "step3p5": _STEP35,
        "gpt_oss": _GPT_OSS,
        "deepseek_v2": DEEPSEEK,
        "deepseek_v3": DEEPSEEK,
        "gemma3n_text": _GEMMA3N,
        "gemma4_text": _GEMMA4,
        "exaone_moe": _EXAONE_MOE,
        "llama4_text": _LLAMA4,
        "mistral4": _MISTRAL4,
        "minicpm3": DEEPSEEK,
        "qwen2_moe": _QWEN2_MOE,
        "olmoe": _QWEN3_MOE,
        "glm4_moe": _GLM4_MOE,
        "deepseek": replace(
            LLAMA, layer={**DECODER.layer, **EXPERTS, **_shared("mlp.shared_experts")}
        ),
        "dots1": _GLM4_MOE,
        "cohere2_moe": _COHERE2_MOE,
        "hy_v3": _HY_V3,
        "mellum": _QWEN3_MOE,
        "ernie4_5_moe": _ERNIE,
        "hunyuan_v1_moe": _HUNYUAN_MOE,
        "minimax_m2": _MINIMAX,
        "minimax_m3_vl_text": _MINIMAX_M3,
        "phimoe": replace(DECODER, layer={**DECODER.layer, **_W123}),
        "afmoe": _AFMOE,
        "bailing_moe": _BAILING_1,
        "bailing_moe_v2": _BAILING,
        "granitemoe": _GRANITE_MOE,
        "granitemoeshared": _GRANITE_MOE,
    }
)
