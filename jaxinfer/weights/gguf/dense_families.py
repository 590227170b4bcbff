"""The families of dense decoders, as data.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's src/models/*.cpp, one file for each
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.families import (
    LLAMA_BIASES,
    METAS,
    QKV_BIAS,
    REFERENCE,
    ROPE_REMARK,
    WINDOWED,
    Family,
    Reader,
    constant,
    granite_factors,
    ignored,
    image_positions,
    number,
    optional_number,
    windows,
)
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.stored import read_tensor

BOTH = (REFERENCE, METAS)
_LAYER_NORM = MappingProxyType({"eps": "layer_norm_eps"})
_PARTIAL = MappingProxyType({"partial": True})
_NO_ROPE_INTERVAL = 4  # llama.cpp's constant for SmolLM3
_GELU = ("gelu_pytorch_tanh", "gelu", "gelu_new")


def _query_scale(large: int) -> Reader:
    """Gemma's ``query_pre_attn_scalar``: the width of a head, but of models with so many layers
    the width by the number of heads.
    """

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
        of_head = meta.count("attention.key_length", max(width // heads, 1))
        return {"query_pre_attn_scalar": width // heads if meta.num_layers == large else of_head}

    return read


def _falcon(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Falcon's norms; one KV head is written as those of the larger models are."""
    return {"num_ln_in_parallel_attn": 1 + meta.has_in_a_layer("attn_norm_2.weight")}


def _stablelm(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Blocks are parallel where they share a norm, whatever the key says, as in llama.cpp."""
    meta.skip("use_parallel_residual")
    return {"use_parallel_residual": not meta.has_in_a_layer("ffn_norm.weight")}


def _gpt_neox(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    meta.only("attention.head_count_kv", meta.count("attention.head_count"))
    return {"use_parallel_residual": meta.flag("use_parallel_residual")}


def _olmo2(meta: ArchitectureMetadata) -> dict[str, Any]:
    """OLMo 2, or OLMo 3, which has windows and scales the rope only of layers without one."""
    return (_OLMO3 if meta.number_if_set("attention.sliding_window") else _OLMO2)(meta)


def _apertus(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Apertus, whose config.json has a scaled rope by default; a file says so by factors."""
    config = _APERTUS(meta)
    return config | {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}


def _muse_glimmer(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Which layers rotate, which are those with a window, and the factor of queries, which the
    file has as the weights of their norms.
    """
    theta = meta.number("rope.freq_base", 10000.0)
    meta.only("rope.freq_base_swa", theta)
    kinds = windows(4)(meta)
    factors = set[float]()
    for i in range(meta.num_layers):
        for name, found in (("q", factors), ("k", set[float]())):
            stored = f"blk.{i}.attn_{name}_norm.weight"
            if not meta.has_tensor(stored):
                raise CheckpointError(
                    f"{meta.header.path} has no tensor {stored}; download it again"
                )
            found |= {float(one) for one in read_tensor(meta.header.tensors[stored])}
            if len(found) != 1 or (name == "k" and found != {1.0}):
                raise CheckpointError(
                    f"tensor {stored} of {meta.header.path} holds {short(sorted(found))}; only one "
                    "factor of all queries and 1 for keys are supported; use another model"
                )
    own = [theta if one == WINDOWED else 0 for one in kinds["layer_types"]]
    factor = float(str(np.float32(factors.pop())))
    return {**kinds, "layer_rope_theta": own, "qk_scale_factor": factor}


def _deci(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Nemotron-NAS: the heads and the width of each layer, 0 without attention or a network."""
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    lists = [meta.counts(name) for name in names]
    most, blocks = max(lists[0]), list[Any]()
    for heads, kv_heads, width in zip(*lists, strict=True):
        if heads not in (0, most) or (heads and (not kv_heads or heads % kv_heads)):
            words = "must be 0 or the same number in each layer, a multiple of its KV heads"
            meta.refuse(names[0], lists[0], words, "use another model")
        attention = {"n_heads_in_group": heads // kv_heads} if heads else {"no_op": True}
        network = {"intermediate_size": width} if width else {"no_op": True}
        blocks.append({"attention": attention, "ffn": network})
    return {
        **{"num_attention_heads": most, "num_key_value_heads": most},
        "block_configs": blocks,
    }


def _minicpm(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """MiniCPM's factors; files that lack them are of the first models, which share them."""
    width, layers = meta.count("embedding_length"), meta.num_layers
    depth, scale = meta.number_if_set("residual_scale"), meta.number_if_set("logit_scale")
    return {
        "scale_emb": meta.number_if_set("embedding_scale") or 12.0,
        # the file has a float32 of a short number by the root
        "scale_depth": 1.4 if depth is None else round(depth * layers**0.5, 6),
        "dim_model_base": 256 if scale is None else round(width / scale),
    }


def _mistral3(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Ministral 3, whose queries grow with positions; without that key the text of Mistral 3."""
    growth = meta.number_if_set("attention.temperature_scale")
    if growth is None:
        return _MISTRAL(meta)
    mscale = meta.number("rope.scaling.yarn_log_multiplier", 1.0)
    config = _MINISTRAL3(meta)
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        meta.refuse("attention.temperature_scale", growth, "is supported only beside YaRN")
    own = {"mscale": 1.0, "mscale_all_dim": mscale, "llama_4_scaling_beta": growth}
    return config | {"rope_scaling": scaling | own}


_MISTRAL = Family("LlamaForCausalLM", "llama", present=LLAMA_BIASES, data_layouts=BOTH)
_MINISTRAL3 = Family(
    "Ministral3ForCausalLM", "ministral3", fixed={"sliding_window": None}, data_layouts=BOTH
)
_APERTUS = Family(
    "ApertusForCausalLM", "apertus", options={"activations": ("xielu",)}, present=QKV_BIAS
)
_OLMO2 = Family("Olmo2ForCausalLM", "olmo2", present=QKV_BIAS)
_OLMO3 = Family("Olmo3ForCausalLM", "olmo3", present=QKV_BIAS, readers=(windows(4),))
DENSE_FAMILIES: Mapping[str, Any] = MappingProxyType(
    {
        "gemma": Family("GemmaForCausalLM", "gemma", options={"activations": _GELU}),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            "gemma2",
            options={"activations": _GELU},
            renamed={"hidden_act": "hidden_activation"},
            readers=(
                windows(2, default=4096),
                number("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
                number("final_logit_softcapping", "final_logit_softcapping", 30.0),
                _query_scale(large=46),
            ),
        ),
        "gemma3": Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            options={"activations": _GELU},
            renamed={"hidden_act": "hidden_activation"},
            readers=(
                windows(6),
                number("rope_local_base_freq", "rope.freq_base_swa", 10000.0),
                _query_scale(large=62),
            ),
        ),
        "command-r": Family(
            "CohereForCausalLM",
            "cohere",
            options=_LAYER_NORM,
            present={**QKV_BIAS, "use_qk_norm": "attn_q_norm.weight"},
            readers=(number("logit_scale", "logit_scale"),),
        ),
        "cohere2": Family(
            "Cohere2ForCausalLM",
            "cohere2",
            options=_LAYER_NORM,
            present=QKV_BIAS,
            readers=(number("logit_scale", "logit_scale"), windows(4)),
        ),
        "phi2": Family(
            "PhiForCausalLM",
            "phi",
            options={**_LAYER_NORM, **_PARTIAL, "activations": ("gelu_new", *_GELU)},
        ),
        "falcon": Family(
            "FalconForCausalLM",
            "falcon",
            fixed={"new_decoder_architecture": True, "bias": False},
            options={"eps": "layer_norm_epsilon", "activations": ("gelu",)},
            renamed={
                "intermediate_size": "ffn_hidden_size",
                "num_key_value_heads": "num_kv_heads",
                "hidden_act": "activation",
            },
            data_layouts=("jploski",),
            readers=(_falcon,),
        ),
        "stablelm": Family(
            "StableLmForCausalLM",
            "stablelm",
            options={**_LAYER_NORM, **_PARTIAL},
            present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
            readers=(_stablelm,),
        ),
        "gptneox": Family(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            options={**_LAYER_NORM, **_PARTIAL, "activations": ("gelu",)},
            renamed={
                "partial_rotary_factor": "rotary_pct",
                "rope_theta": "rotary_emb_base",
                "num_key_value_heads": None,
            },
            present={"attention_bias": "attn_qkv.bias"},
            readers=(_gpt_neox,),
        ),
        "nemotron": Family(
            "NemotronForCausalLM",
            "nemotron",
            options={"eps": "norm_eps", **_PARTIAL, "activations": ("relu2",)},
            present=LLAMA_BIASES,
        ),
        "olmo": Family(
            "OlmoForCausalLM",
            "olmo",
            options={"eps": "layer_norm_eps"},
            renamed={"layer_norm_eps": None},
            present=QKV_BIAS,
            data_layouts=BOTH,
            readers=(
                constant("attention.layer_norm_epsilon", 1e-5),
                optional_number("clip_qkv", "attention.clamp_kqv"),
            ),
        ),
        "olmo2": _olmo2,
        "muse-glimmer": Family(
            "MuseGlimmerForConditionalGeneration",
            "muse_glimmer_text",
            fixed={"post_norm_eps": 1e-8},  # llama.cpp's constant
            renamed={"hidden_act": "hidden_activation"},
            data_layouts=BOTH,
            readers=(
                _muse_glimmer,
                number("output_multiplier", "logit_scale"),
                number("final_logit_softcapping", "final_logit_softcapping"),
            ),
        ),
        "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", present=QKV_BIAS),
        "apertus": _apertus,
        "jais2": Family(
            "Jais2ForCausalLM",
            "jais2",
            options={**_LAYER_NORM, "activations": ("relu2",)},
            present=LLAMA_BIASES,
        ),
        "chatglm": Family(
            "GlmForCausalLM",
            "glm",
            options=_PARTIAL,
            present={"attention_bias": ("attn_q.bias", "attn_qkv.bias")},
        ),
        # The text of models with images.
        "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", readers=(image_positions,)),
        "qwen3vl": Family(
            "Qwen3ForCausalLM",
            "qwen3",
            present=QKV_BIAS,
            readers=(image_positions, ignored("n_deepstack_layers")),
        ),
        "mistral3": _mistral3,
        "glm4": Family("Glm4ForCausalLM", "glm4", options=_PARTIAL, present=QKV_BIAS),
        "bitnet": Family("BitNetForCausalLM", "bitnet", present=QKV_BIAS),
        "exaone4": Family("Exaone4ForCausalLM", "exaone4", readers=(windows(4, optional=True),)),
        "granite": Family(
            "GraniteForCausalLM",
            "granite",
            options={"scaled": True},
            present=LLAMA_BIASES,
            data_layouts=BOTH,
            readers=(granite_factors, constant(ROPE_REMARK, True)),
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            "smollm3",
            fixed={"no_rope_layer_interval": _NO_ROPE_INTERVAL},
            present=LLAMA_BIASES,
            data_layouts=BOTH,
        ),
        "arcee": Family(
            "ArceeForCausalLM",
            "arcee",
            options={"activations": ("relu2",)},
            present=LLAMA_BIASES,
            data_layouts=BOTH,
        ),
        "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", present={"use_bias": "attn_q.bias"}),
        # its converter gives q, k and v tensors of their own, in Llama's order
        "internlm2": Family("LlamaForCausalLM", "llama", present=LLAMA_BIASES, data_layouts=BOTH),
        "exaone": Family("ExaoneForCausalLM", "exaone", present=LLAMA_BIASES),
        "deci": Family(
            "DeciLMForCausalLM",
            "nemotron-nas",
            options={"dense": False},
            present=LLAMA_BIASES,
            data_layouts=BOTH,
            readers=(_deci,),
        ),
        "minicpm": Family(
            "MiniCPMForCausalLM",
            "minicpm",
            present={"attention_bias": "attn_q.bias"},
            data_layouts=BOTH,
            readers=(_minicpm,),
        ),
        "orion": Family(
            "OrionForCausalLM",
            "orion",
            options=_LAYER_NORM,
            renamed={"layer_norm_eps": "rms_norm_eps"},
        ),
        "seed_oss": Family(
            "SeedOssForCausalLM",
            "seed_oss",
            present={**LLAMA_BIASES, "attention_out_bias": "attn_output.bias"},
        ),
        "starcoder2": Family(
            "Starcoder2ForCausalLM",
            "starcoder2",
            fixed={"sliding_window": None},  # llama.cpp computes without it, and files lack it
            options={"eps": "norm_epsilon", "activations": _GELU},
            present={"use_bias": "attn_q.bias"},
        ),
    }
)
