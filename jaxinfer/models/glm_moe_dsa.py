"""GLM-5: DeepSeek-V3.2's attention, where some layers attend to the tokens that earlier ones chose.

Source: ``modeling_glm_moe_dsa`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.indexed_latent import indexed_config, indexed_param_specs, indexer_kinds
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEADS = 32  # of index_n_heads
_DEFAULTS = MappingProxyType({"routed_scaling_factor": 2.5, "q_lora_rank": 2048})


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    hf.supported_only(config, "topk_method", "noaux_tc")
    own = hf.with_defaults(config, _DEFAULTS)
    ffns = networks_by_layer(config, biased_experts(own), first=3)
    kinds = indexer_kinds(config, len(ffns))
    return indexed_config(own, dtype, heads=_HEADS, interleaved=True, ffns=ffns, kinds=kinds)


FAMILY = ModelFamily(
    name="glm_moe_dsa",
    config_from_hf=config_from_hf,
    param_specs=indexed_param_specs,
    # which some copies of GLM-5.2 have in layers that follow another one, too
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"model\.layers\.\d+\.self_attn\.indexer\..*"),
)
