"""Qwen2's mixtures of experts (Qwen1.5-MoE, Qwen2-57B-A14B): a gated expert for all tokens.

Source: ``modeling_qwen2_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, sparse_layers
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hybrid import EXPERT_TENSORS, gated_experts
from jaxinfer.models.layer_kinds import upper_layer_windows
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    renormalised = hf.flag(config, "norm_topk_prob", False)
    experts = gated_experts(config, renormalised=renormalised)
    if config.get("sliding_window") == 0:  # as transformers saves a window that is switched off
        config = hf.with_values(config, {"sliding_window": None})
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "qkv_bias", True),
        windows=upper_layer_windows(config),
        ffns=sparse_layers(config, experts),
    )


FAMILY = ModelFamily(
    name="qwen2_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=EXPERT_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
