"""Persimmon: LayerNorms, also of queries and keys, squared ReLUs; half of each head rotates.

Source: ``modeling_persimmon`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import even_rotary, rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.5  # transformers' default
_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    o="self_attn.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    packed=True,
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    heads = hf.positive_int(config, "num_attention_heads")
    config.get("num_key_value_heads")  # which transformers does not use
    return gqa_config(
        hf.with_values(config, {"num_key_value_heads": heads}),
        dtype,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="layer" if hf.flag(config, "qk_layernorm", True) else None,
        rope=even_rotary(rope_config(config, hf.head_dim(config), partial=_PARTIAL_ROTARY)),
        gated=False,
        activation=hf.activation(config, "hidden_act", "relu2"),
        norm="layer",
    )


FAMILY = ModelFamily(
    name="persimmon",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
