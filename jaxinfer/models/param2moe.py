"""Param2 (BharatGen): the decoder of Ling 2.0, with norms of heads only where the file has them.

Source: the published ``modeling_param2moe.py``; transformers has no class of it. Its biases of
choices have no mean there, which changes no choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.bailing_parts import NAMES, TENSORS, check_keys
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    RoutingKeys,
    expert_specs,
    experts_config,
    gated_network,
    grouped_routing,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig

_KEYS = RoutingKeys(scores="score_function")
_SHARED = "moe_shared_expert_intermediate_size"  # the width of all shared experts together


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    check_keys(config)
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "use_qkv_bias", False),
        qk_norm="head" if hf.flag(config, "use_qk_norm", False) else None,
        head_dim=hf.head_dim(config),
        partial_rotary=1.0,
        ffns=networks_by_layer(config, _experts(config), first=1),
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Experts that biased sigmoids choose, and those of all tokens."""
    hf.supported_only(config, "score_function", "sigmoid")
    number = hf.layer_index(config, "num_shared_experts", 1)
    width = number * hf.positive_int(config, "moe_intermediate_size")
    width = hf.positive_int(config, _SHARED, width or 1) if number else 0
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(config, "sigmoid", _KEYS),
        choice_bias=hf.flag(config, "moe_router_enable_expert_bias", True),
        shared=gated_network(config, width) if width else None,
    )


FAMILY = ModelFamily(
    name="param2moe",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        names=NAMES,
        experts=partial(expert_specs, names=TENSORS),
    ),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq"),
)
