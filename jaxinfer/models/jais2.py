"""Jais 2: LayerNorm, biases, and a network without a gate, by default of squared ReLUs.

Source: ``modeling_jais2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.names import PLAIN
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", True)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", True),
        gated=False,
        activation=hf.activation(config, "hidden_act", "relu2"),
        norm="layer",
    )


FAMILY = ModelFamily(
    name="jais2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=PLAIN),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
