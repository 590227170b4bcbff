"""Granite 3 and 4 (dense): factors on embeddings, outputs of blocks, attention scores and logits.

Source: ``modeling_granite`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import DecoderSpec, PlainResidual


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        qk_norm=None,
        windows=windows_by_layer(config, None),
        **factors(config),
    )


def factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of Granite's configs, as arguments of ``gqa_config``."""
    return {
        "scale": hf.positive_float(config, "attention_multiplier", 1.0),
        "embed_scale": hf.positive_float(config, "embedding_multiplier", 1.0),
        "residual": PlainResidual(scale=hf.positive_float(config, "residual_multiplier", 1.0)),
        "logit_scale": 1.0 / hf.positive_float(config, "logits_scaling", 1.0),
    }


FAMILY = ModelFamily(
    name="granite",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
