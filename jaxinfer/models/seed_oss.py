"""Seed-OSS: the shared decoder with biases of queries, keys and values.

Source: ``modeling_seed_oss`` of Hugging Face transformers.
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
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", True),
        o_bias=hf.flag(config, "attention_out_bias", False),
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=hf.head_dim(config, _HEAD_DIM),
    )


FAMILY = ModelFamily(
    name="seed_oss",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
