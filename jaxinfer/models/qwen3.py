"""Qwen3 (dense): the shared decoder with RMSNorm on each head's query and key.

Source: ``modeling_qwen3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import upper_layer_windows
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM = 128  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=upper_layer_windows(config),
    )


FAMILY = ModelFamily(
    name="qwen3",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
