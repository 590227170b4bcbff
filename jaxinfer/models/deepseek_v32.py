"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to those that an indexer has chosen.

Source: ``modeling_deepseek_v32`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.indexed_latent import indexed_config, indexed_param_specs
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS
from jaxinfer.nn.decoder_config import DecoderSpec

_HEADS = 64  # transformers' default of index_n_heads
_ROUTING = MappingProxyType({"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4})


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    hf.supported_only(config, "topk_method", "noaux_tc")
    own = hf.with_defaults(config, _ROUTING)
    ffns = networks_by_layer(config, biased_experts(own), first=3)
    return indexed_config(own, dtype, heads=_HEADS, interleaved=False, ffns=ffns)


FAMILY = ModelFamily(
    name="deepseek_v32",
    config_from_hf=config_from_hf,
    param_specs=indexed_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
