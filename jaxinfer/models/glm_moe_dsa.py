"""GLM-5: DeepSeek-V3.2's attention, where some layers attend to the tokens that earlier ones chose.

Source: ``modeling_glm_moe_dsa`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.indexed_latent import FULL, SHARED, indexed_config, indexed_param_specs
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEADS = 32  # of index_n_heads
_DEFAULTS = MappingProxyType({"routed_scaling_factor": 2.5, "q_lora_rank": 2048})
_OFFSET = 2  # of index_skip_topk_offset
_LETTERS = MappingProxyType({"F": FULL, "S": SHARED})  # of index_topk_pattern


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    hf.supported_only(config, "topk_method", "noaux_tc")
    own = hf.with_defaults(config, _DEFAULTS)
    ffns = networks_by_layer(config, biased_experts(own), first=3)
    kinds = _indexer_kinds(config, len(ffns))
    return indexed_config(own, dtype, heads=_HEADS, interleaved=True, ffns=ffns, kinds=kinds)


def _indexer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Whether each layer has an indexer: ``indexer_types`` decides, else a pattern, else a step."""
    given = hf.layer_kinds(config, "indexer_types", num_layers, (FULL, SHARED))
    pattern = config.get("index_topk_pattern")
    step = max(hf.layer_index(config, "index_topk_freq", 1), 1)
    first = hf.layer_index(config, "index_skip_topk_offset", _OFFSET) - 1  # that may follow one
    if isinstance(pattern, str):
        pattern = [_LETTERS.get(letter, letter) for letter in pattern]
    if given is None:
        key = "index_topk_pattern"
        given = hf.layer_kinds({key: pattern}, key, num_layers, (FULL, SHARED))
    kinds = given or [SHARED if max(i - first, 0) % step else FULL for i in range(num_layers)]
    if kinds[0] != FULL:
        raise ConfigError(
            f"config key 'indexer_types' is {short(kinds)}; the first layer needs an indexer"
        )
    return kinds


FAMILY = ModelFamily(
    name="glm_moe_dsa",
    config_from_hf=config_from_hf,
    param_specs=indexed_param_specs,
    # which some copies of GLM-5.2 have in layers that follow another one, too
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"model\.layers\.\d+\.self_attn\.indexer\..*"),
)
