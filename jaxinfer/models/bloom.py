"""BLOOM: ALiBi, a LayerNorm of embeddings, and queries, keys and values of a head in one tensor.

Source: ``modeling_bloom`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.layer_spec import BlockFactors
from jaxinfer.nn.positions import Alibi

_POSITIONS = 2048  # of the published models; the bias has no end
# Settings of the training program, which transformers does not read.
_UNUSED = (
    *("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion"),
    *("skip_bias_add", "skip_bias_add_qkv", "offset_alibi"),
)
_NAMES = TensorNames(
    embed="word_embeddings",
    embed_norm="word_embeddings_layernorm",
    layer="h.{}.",
    final_norm="ln_f",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    packed=True,
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for unused in _UNUSED:
        config.get(unused)
    width = hf.positive_int(config, hf.first_of(config, "hidden_size", "n_embed"))
    layers, heads = (
        hf.positive_int(config, hf.first_of(config, *keys))
        for keys in (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"))
    )
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": hf.positive_int(config, "seq_length", _POSITIONS),
    }
    decoder = plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation="gelu_tanh",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        attention={"alibi": Alibi(heads)},
        embed_norm=True,
    )
    if not hf.flag(config, "apply_residual_connection_post_layernorm", False):
        return decoder
    layers = (replace(layer, on_norms=(BlockFactors(),) * 2) for layer in decoder.layers)
    return replace(decoder, layers=tuple(layers))


FAMILY = ModelFamily(
    name="bloom",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight",),
    optional_prefix="transformer.",
)
