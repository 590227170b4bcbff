"""Qwen3's mixtures of experts: Qwen3 whose layers, all or some of them, have experts.

Source: ``modeling_qwen3_moe`` of Hugging Face transformers. Published are 30B-A3B and 235B-A22B.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, experts_config, experts_per_token, sparse_layers
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from pallas_kernels.route.routing import Routing


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    window = sliding_window(config)
    if not hf.flag(config, "use_sliding_window", False):
        window = None
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=windows_by_layer(config, window),
        ffns=sparse_layers(config, _experts(config)),
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    routing = Routing(
        experts_per_token(config), renormalised=hf.flag(config, "norm_topk_prob", False)
    )
    return experts_config(
        config, count="num_experts", width="moe_intermediate_size", routing=routing
    )


FAMILY = ModelFamily(
    name="qwen3_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
