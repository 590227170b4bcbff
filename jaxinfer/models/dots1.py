"""dots.llm1: experts as in DeepSeek-V3, grouped-query attention with norms of heads, windows.

Source: ``modeling_dots1`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

_FIRST_WINDOW = 62  # transformers' default of max_window_layers
_METHOD = "noaux_tc"  # which published files have as the name of the scoring function, too


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    bias = hf.flag(config, "attention_bias", False)
    first = hf.layer_index(config, "max_window_layers", _FIRST_WINDOW)
    own = config
    if config.get("scoring_func") == _METHOD:
        own = hf.with_values(config, {"scoring_func": "sigmoid"})
    experts = biased_experts(own, renormalised=False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=windows_by_layer(config, sliding_window(config), first),
        ffns=networks_by_layer(config, experts, first=0),
    )


FAMILY = ModelFamily(
    name="dots1",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
