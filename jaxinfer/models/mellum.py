"""Mellum 2: Qwen3's mixtures with windows, whose layers have a rope of their own.

Source: ``modeling_mellum`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    expert_specs,
    experts_config,
    experts_per_token,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _WINDOW = 128, 1024
_THETA, _LOCAL_THETA = 5e5, 1e4


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, head_dim = (
        hf.flag(config, "attention_bias", False),
        hf.positive_int(config, "head_dim", _HEAD_DIM),
    )
    window = sliding_window(config, _WINDOW)
    windows = windows_by_layer(config, window if config.get("layer_types") else None)
    rope, local = ropes_by_kind(config, head_dim, theta=_THETA, local_theta=_LOCAL_THETA)
    renormalised = hf.flag(config, "norm_topk_prob", True)
    experts = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=Routing(experts_per_token(config), renormalised=renormalised),
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        local_rope=local,
        ffns=networks_by_layer(config, experts, first=0),
    )


FAMILY = ModelFamily(
    name="mellum",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"mtp\..*"),
)
