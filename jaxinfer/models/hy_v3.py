"""Hunyuan 3 (Hy3): norms of heads, dense first layers, experts chosen by biased sigmoids.

Source: ``modeling_hy_v3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, biased_experts, expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _THETA, _SCALE = 128, 11_158_840.0, 2.826
_TENSORS = ExpertTensors(
    router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_mlp."
)
_ON = ("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _ON:
        hf.supported_only(config, key, True)
    for key in ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"):
        config.get(key)  # sums are in float32 here
    bias = hf.flag(config, "attention_bias", False)
    width = hf.positive_int(config, "moe_intermediate_size")
    hf.supported_only(config, "expert_hidden_dim", width)
    scale = {"routed_scaling_factor": hf.positive_float(config, "router_scaling_factor", _SCALE)}
    own = hf.with_values(config, scale)
    mlp_bias = hf.flag(config, "mlp_bias", False)  # experts have none
    experts = biased_experts(
        own, count="num_experts", shared="num_shared_experts", shared_bias=mlp_bias
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        ffns=networks_by_layer(config, experts, first=1, bias=mlp_bias),
    )


FAMILY = ModelFamily(
    name="hy_v3",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
