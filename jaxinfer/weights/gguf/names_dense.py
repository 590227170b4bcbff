"""The tables of decoders whose layers have attention and a dense network.

Source: the conversion scripts of llama.cpp (``convert_hf_to_gguf.py``, later ``conversion/``), read
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxinfer.weights.gguf.names import Layout, NameTable

DECODER = NameTable(
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


def _without(table: NameTable, *stems: str) -> dict[str, str]:
    """The names of a layer's tensors but these."""
    return {stem: name for stem, name in table.layer.items() if stem not in stems}


def plus_one(*stems: str) -> dict[str, Layout]:
    """Norms whose weights the file has as 1 + w."""
    return {f"{stem}.weight": "norm" for stem in stems}


LLAMA = replace(DECODER, interleaved=("attn_q", "attn_k"))
_ARCEE = replace(LLAMA, layer=_without(LLAMA, "ffn_gate"))
_OLMO2 = replace(
    DECODER,
    layer=_without(DECODER, "attn_norm", "ffn_norm")
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_PHI3 = replace(
    DECODER,
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
    DECODER,
    layer=_without(DECODER, "ffn_gate")
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
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
_STARCODER = replace(_GPT2, transposed=())
_STARCODER2 = replace(
    DECODER,
    layer=_without(DECODER, "ffn_gate") | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
)
_SEED_OSS = replace(
    DECODER,
    layer=_without(DECODER, "ffn_norm") | {"post_attention_norm": "post_attention_layernorm"},
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
# With names that say what is before and what is after a block.
SANDWICH = MappingProxyType(
    {
        **DECODER.layer,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GEMMA_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
_GEMMA = replace(DECODER, layouts=plus_one(*_GEMMA_NORMS))
_GEMMA2 = replace(_GEMMA, layer=SANDWICH)
_GEMMA3 = replace(_GEMMA2, layouts=plus_one(*_GEMMA_NORMS, "attn_q_norm", "attn_k_norm"))
_MUSE_GLIMMER = replace(
    LLAMA,
    layer={**SANDWICH, "attn_gate": "self_attn.gate_proj"},
    layouts=plus_one(*_GEMMA_NORMS[:-1]),
)
_COHERE = replace(DECODER, layer=_without(DECODER, "ffn_norm"))
_STABLELM = replace(
    DECODER,
    layer={
        **DECODER.layer,
        "attn_q_norm": "self_attn.q_layernorm.norms.{}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{}",
    },
    layouts={"attn_q_norm": "each_head", "attn_k_norm": "each_head"},
)
_PHI = replace(
    DECODER,
    model={**DECODER.model, "output_norm": "model.final_layernorm"},
    layer=_without(DECODER, "ffn_gate", "ffn_norm")
    | {
        "attn_output": "self_attn.dense",
        "attn_qkv": "self_attn.{}_proj",  # of older files
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    layouts={"attn_qkv": "query_key_value"},
)
_CHATGLM = replace(
    DECODER,
    layer=_without(DECODER, "ffn_gate")
    | {"ffn_up": "mlp.gate_up_proj", "attn_qkv": "self_attn.{}_proj"},
    layouts={"attn_qkv": "query_key_value"},
)
_NEMOTRON = replace(
    DECODER,
    layer=_without(DECODER, "ffn_gate"),
    layouts=plus_one("attn_norm", "ffn_norm", "output_norm"),
)
_HUNYUAN = replace(
    DECODER,
    layer={
        **DECODER.layer,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
)
_APERTUS = replace(
    DECODER,
    layer=_without(DECODER, "ffn_gate")
    | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    from_metadata={
        f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
        for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ()))
    },
)
_BITNET = replace(
    DECODER,
    layer={
        **DECODER.layer,
        "attn_sub_norm": "self_attn.attn_sub_norm",
        "ffn_sub_norm": "mlp.ffn_sub_norm",
    },
)
_FALCON = NameTable(
    model={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layer_prefix="transformer.h.",
    layouts={"attn_qkv": "packed"},
    heads=("num_attention_heads", "num_kv_heads"),
)
FALCON_WITH_TWO_NORMS = replace(
    _FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
_BLOOM = replace(
    _FALCON,
    model={**_FALCON.model, "token_embd_norm": "transformer.word_embeddings_layernorm"},
    layer={**_FALCON.layer, "ffn_norm": "post_attention_layernorm"},
    heads=("n_head", "n_head"),
)
_GPT_NEOX = replace(
    _FALCON,
    model={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    layer={
        **_FALCON.layer,
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
    },
    layer_prefix="gpt_neox.layers.",
    heads=("num_attention_heads", "num_attention_heads"),
)
_MPT = NameTable(
    model={
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    layer_prefix="transformer.blocks.",
)
# by the model_type of config.json
DENSE_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {
        "llama": LLAMA,
        "ministral3": LLAMA,
        "qwen2": DECODER,
        "qwen3": DECODER,
        "olmo": LLAMA,
        "olmo2": _OLMO2,
        "olmo3": _OLMO2,
        "exaone4": _OLMO2,
        "phi": _PHI,
        "phi3": _PHI3,
        "glm": _CHATGLM,
        "glm4": _GLM4,
        "gpt2": _GPT2,
        "granite": LLAMA,
        "smollm3": LLAMA,
        "arcee": _ARCEE,
        "ernie4_5": DECODER,
        "exaone": _EXAONE,
        "nemotron-nas": LLAMA,
        "minicpm": LLAMA,
        "orion": DECODER,
        "seed_oss": _SEED_OSS,
        "starcoder2": _STARCODER2,
        "gpt_bigcode": _STARCODER,
        "gemma": _GEMMA,
        "gemma2": _GEMMA2,
        "gemma3_text": _GEMMA3,
        "muse_glimmer_text": _MUSE_GLIMMER,
        "cohere": _COHERE,
        "cohere2": _COHERE,
        "stablelm": _STABLELM,
        "falcon": _FALCON,
        "gpt_neox": _GPT_NEOX,
        "nemotron": _NEMOTRON,
        "hunyuan_v1_dense": _HUNYUAN,
        "apertus": _APERTUS,
        "bloom": _BLOOM,
        "mpt": _MPT,
        "jais2": replace(DECODER, layer=_without(DECODER, "ffn_gate")),
        "bitnet": _BITNET,
    }
)
