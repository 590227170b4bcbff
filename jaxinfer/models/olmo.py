"""OLMo 1: LayerNorm without parameters; queries, keys and values may be limited.

Source: ``modeling_olmo`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_EPS = 1e-5  # not a key of config.json
_NORMS = NormSources(names=())


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, clip = hf.flag(config, "attention_bias", False), config.get("clip_qkv")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        norm="layer_plain",
        norm_eps=_EPS,
        attention={"clip": None if clip is None else hf.positive_float(config, "clip_qkv")},
    )


FAMILY = ModelFamily(
    name="olmo",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
