"""OLMoE: experts in all layers, and norms of all heads of queries and of keys.

Source: ``modeling_olmoe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, clip = hf.flag(config, "attention_bias", False), config.get("clip_qkv")
    renormalised = hf.flag(config, "norm_topk_prob", False)
    routing = Routing(experts_per_token(config), renormalised=renormalised)
    experts = experts_config(
        config, count="num_experts", width="intermediate_size", routing=routing
    )
    windows = windows_by_layer(config, None)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all_heads",
        windows=windows,
        ffns=[experts] * len(windows),
        attention={"clip": None if clip is None else hf.positive_float(config, "clip_qkv")},
    )


FAMILY = ModelFamily(
    name="olmoe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
