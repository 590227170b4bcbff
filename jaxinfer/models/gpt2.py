"""GPT-2: learned positions, LayerNorm with biases, full multi-head attention, GELU.

Source: ``modeling_gpt2`` of Hugging Face transformers. ``gpt2_parts`` has the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gpt2_parts import gpt2_config, gpt2_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gpt2_config(config, dtype)


FAMILY = ModelFamily(
    name="gpt2",
    config_from_hf=config_from_hf,
    param_specs=gpt2_param_specs,
    ignored_tensors=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
