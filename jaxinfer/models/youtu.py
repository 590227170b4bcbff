"""Youtu-LLM: DeepSeek's latent attention with dense networks, and a tied head.

Source: ``modeling_youtu`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    dense_network,
    latent_config,
    latent_param_specs,
)
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_bias", False)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return latent_config(
        config,
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        ffns=[dense_network(config, bias=False)] * num_layers,
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", True),
    )


FAMILY = ModelFamily(
    name="youtu",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
