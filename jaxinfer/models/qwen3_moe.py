"""Qwen3's mixtures of experts: Qwen3 whose layers, all or some of them, have experts.

Source: ``modeling_qwen3_moe`` of Hugging Face transformers. Published are 30B-A3B and 235B-A22B.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, FeedForwardSpec
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
        ffns=_ffns(config),
    )


def _ffns(config: Mapping[str, Any]) -> list[FeedForwardSpec]:
    """The network of each layer: dense in ``mlp_only_layers``, and where a step skips layers."""
    routing = Routing(
        experts_per_token(config), renormalised=hf.flag(config, "norm_topk_prob", False)
    )
    experts = experts_config(
        config, count="num_experts", width="moe_intermediate_size", routing=routing
    )
    num_layers = hf.positive_int(config, "num_hidden_layers")
    step = hf.positive_int(config, "decoder_sparse_step", 1)
    given, known = config.get("mlp_only_layers") or [], range(num_layers)
    listed = given if isinstance(given, list) else [None]
    if len(listed) > num_layers or not all(type(one) is int and one in known for one in listed):
        raise ConfigError(
            f"config key 'mlp_only_layers' must be a list of layers below {num_layers}, got "
            f"{short(given)}"
        )
    dense_layers = {*listed}
    width = hf.positive_int(config, "intermediate_size")
    dense = FeedForwardConfig(width=width, activation="silu", gated=True)
    return [dense if i in dense_layers or (i + 1) % step else experts for i in range(num_layers)]


FAMILY = ModelFamily(
    name="qwen3_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
