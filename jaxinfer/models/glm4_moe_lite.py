"""GLM-4.7-Flash: latent attention, and experts chosen by biased sigmoids.

Source: ``modeling_glm4_moe_lite`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_config, latent_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_SCALE, _QUERY_RANK = 1.8, 768  # transformers' defaults


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    given = {"q_lora_rank": config.get("q_lora_rank", _QUERY_RANK)}
    own = hf.with_defaults(hf.with_values(config, given), {"routed_scaling_factor": _SCALE})
    experts = biased_experts(own)
    return latent_config(
        own,
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        ffns=networks_by_layer(config, experts, first=1),
    )


FAMILY = ModelFamily(
    name="glm4_moe_lite",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
