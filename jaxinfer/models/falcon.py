"""Falcon: parallel blocks with one LayerNorm or two, one or several KV heads, or ALiBi
(falcon-rw), whose slopes transformers rounds to bfloat16.

Source: ``modeling_falcon`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.positions import Alibi

_POSITIONS = 2048  # transformers' default
_NAMES = TensorNames(
    embed="word_embeddings",
    layer="h.{}.",
    final_norm="ln_f",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    packed=True,
)
_SHARED, _OF_EACH = ("input_layernorm",), ("ln_attn", "ln_mlp")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    alibi, layers = hf.flag(config, "alibi", False), hf.positive_int(config, "num_hidden_layers")
    grouped = hf.flag(config, "new_decoder_architecture", False)
    parallel = hf.flag(config, "parallel_attn", True) or grouped
    heads = hf.positive_int(config, "num_attention_heads")
    one_head = hf.flag(config, "multi_query", True) and not grouped
    kv_heads = hf.positive_int(config, "num_kv_heads", heads)
    width, bias = hf.positive_int(config, "hidden_size"), hf.flag(config, "bias", False)
    norms = hf.positive_int(config, "num_ln_in_parallel_attn", 1 + grouped)
    sizes = {
        "num_key_value_heads": 1 if one_head else kv_heads,
        "intermediate_size": hf.positive_int(config, "ffn_hidden_size", 4 * width),
        "max_position_embeddings": hf.positive_int(config, "max_position_embeddings", _POSITIONS),
    }
    return gqa_config(
        hf.with_values(config, sizes),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        rotates=(not alibi,) * layers,
        attention={"alibi": Alibi(heads, (width // heads) ** -0.5) if alibi else None},
        gated=False,
        activation=hf.activation(config, "activation", "gelu"),
        norms="shared" if parallel and not (grouped and norms == 2) else "before",
        norm="layer",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        parallel=parallel,
        tied=True,
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; the names of norms say what they are for."""
    norms, first = NormSources(), config.layers[0]
    if first.parallel:
        norms = NormSources(_SHARED if first.norms == "shared" else _OF_EACH)
    return gqa_param_specs(config, norms=norms, names=_NAMES)


FAMILY = ModelFamily(
    name="falcon",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"lm_head\.weight", r"h\.\d+\.self_attention\.rotary_emb\.inv_freq"),
    optional_prefix="transformer.",
)
