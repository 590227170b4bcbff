"""Solar Open: Llama's attention, and experts as in DeepSeek-V3 in all layers.

Source: ``modeling_solar_open`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, expert_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _THETA = 128, 1e6


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "first_k_dense_replace", 0)
    windows = windows_by_layer(config, None)
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        windows=windows,
        ffns=[biased_experts(config)] * len(windows),
    )


FAMILY = ModelFamily(
    name="solar_open",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
