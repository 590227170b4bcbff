"""ChatGLM2, ChatGLM3 and GLM-4-9B in its first form: GLM's decoder under names of its own.

Source: the published ``modeling_chatglm.py``; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA, _PARTIAL_ROTARY, _EPS = 10000.0, 0.5, 1e-5  # the published code's defaults
_LENGTH, _PADDED_VOCAB, _HEAD_DIM = 2048, 65024, 128
_ONLY = MappingProxyType(  # what all published files have
    {
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "interleaved_qkv": False,
        "prefix_projection": False,
        "pre_seq_len": None,
        "quantization_bit": 0,
    }
)
# Sums and softmax are float32 whatever they say; a factor of scores in float16 is undone there.
_UNUSED = (
    *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "bias_dropout_fusion"),
    "classifier_dropout",
)
_NAMES = TensorNames(
    embed="transformer.embedding.word_embeddings",
    layer="transformer.encoder.layers.{}.",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in _ONLY.items():
        if config.get(key) is not None:
            hf.supported_only(config, key, only)
    for key in _UNUSED:
        config.get(key)
    heads = hf.positive_int(config, "num_attention_heads")
    groups = hf.positive_int(config, "multi_query_group_num", 1)
    if not hf.flag(config, "multi_query_attention", False):
        groups = heads
    bias = hf.flag(config, "add_bias_linear", False)
    own = hf.with_values(
        config,
        {
            "num_hidden_layers": hf.positive_int(config, "num_layers"),
            "intermediate_size": hf.positive_int(config, "ffn_hidden_size"),
            "vocab_size": hf.positive_int(config, "padded_vocab_size", _PADDED_VOCAB),
            "num_key_value_heads": groups,
            "max_position_embeddings": hf.positive_int(config, "seq_length", _LENGTH),
        },
    )
    return gqa_config(
        own,
        dtype,
        qkv_bias=hf.flag(config, "add_qkv_bias", False) or bias,
        o_bias=bias,
        mlp_bias=bias,
        head_dim=hf.positive_int(config, "kv_channels", _HEAD_DIM),
        theta=_THETA * hf.positive_float(config, "rope_ratio", 1.0),
        partial_rotary=_PARTIAL_ROTARY,
        activation="silu",
        norm_eps=hf.positive_float(config, "layernorm_epsilon", _EPS),
    )


FAMILY = ModelFamily(
    name="chatglm",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES, interleaved=True),
    ignored_tensors=(
        r"transformer\.rotary_pos_emb\.inv_freq",
        r"transformer\.output_layer\.weight",
    ),
)
