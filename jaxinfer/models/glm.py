"""GLM-4 (2024): fused gate and up; half of each head rotates, by adjacent components.

Source: ``modeling_glm`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM, _PARTIAL_ROTARY = 128, 0.5  # transformers' defaults
_NAMES = TensorNames(into=("mlp.gate_up_proj",))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", True),
        head_dim=hf.head_dim(config, _HEAD_DIM),
        partial_rotary=_PARTIAL_ROTARY,
    )


FAMILY = ModelFamily(
    name="glm",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES, interleaved=True),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
