"""Qwen2 and Qwen2.5: the shared decoder with biases on queries, keys and values.

Source: ``modeling_qwen2`` of Hugging Face transformers.
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


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.flag(config, "attention_bias", True)  # in some exports; qkv always has biases
    windows = upper_layer_windows(config)
    return gqa_config(config, dtype, qkv_bias=True, windows=windows)


FAMILY = ModelFamily(
    name="qwen2",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
