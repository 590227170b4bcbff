"""Helium: the shared decoder; heads rotate by adjacent components.

Source: ``modeling_helium`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM, _THETA = 128, 1e5  # transformers' defaults


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
    )


FAMILY = ModelFamily(
    name="helium",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, interleaved=True),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
