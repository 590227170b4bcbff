"""DeepSeek MoE 16B: Llama's attention, and experts with DeepSeek-V3's keys, chosen by softmax.

Source: the published ``modeling_deepseek.py``; transformers has no class of it.
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
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    for key, value in (("scoring_func", "softmax"), ("n_group", 1), ("routed_scaling_factor", 1.0)):
        hf.supported_only(config, key, value)  # the published code has no others
    bias = hf.flag(config, "attention_bias", False)
    experts = biased_experts(config, renormalised=False, scores="softmax", choice_bias=False)
    ffns = networks_by_layer(config, experts, first=0)
    return gqa_config(config, dtype, qkv_bias=bias, o_bias=bias, ffns=ffns)


FAMILY = ModelFamily(
    name="deepseek",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
