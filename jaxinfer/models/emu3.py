"""Emu3's text decoder: Llama with another base of its rope. Tokens of images are its own.

Source: ``modeling_emu3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA = 1e6  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        theta=_THETA,
    )


FAMILY = ModelFamily(
    name="emu3",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
