"""Tele-FLM and FLM-2: Llama's decoder with factors on embeddings and logits (muP).

Source: the published ``modeling_teleflm.py``; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    factors: dict[str, Any] = {}
    given = {key: hf.positive_float(config, key, 1.0) for key in ("input_mult", "output_mult")}
    width = hf.positive_float(config, "mup_scale_factor", 1.0)
    if hf.flag(config, "use_mup", False):
        factors["embed_scale"] = given["input_mult"]
        factors["logit_scale"] = given["output_mult"] / width
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        **factors,
    )


FAMILY = ModelFamily(
    name="teleflm",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
