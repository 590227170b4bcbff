"""InternLM 3: the shared decoder; biases of queries, keys and values, and others.

Source: ``modeling_internlm3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM = 128  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    # the published names, and transformers' own
    qkv, others = (
        hf.flag(config, hf.first_of(config, *keys), False)
        for keys in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=qkv,
        o_bias=others,
        mlp_bias=others,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
    )


FAMILY = ModelFamily(
    name="internlm3",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
