"""ERNIE 4.5 (dense): the shared decoder; heads rotate by adjacent components.

Source: ``modeling_ernie4_5`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM, _THETA = 128, 5e5  # transformers' defaults


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "use_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        qk_norm=None,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=windows_by_layer(config, None),
        theta=_THETA,
        tied=True,
    )


FAMILY = ModelFamily(
    name="ernie4_5",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, interleaved=True),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
