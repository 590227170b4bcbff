"""PaddleOCR-VL's text decoder: ERNIE 4.5 whose heads rotate as Llama's do.

Source: ``modeling_paddleocr_vl`` of Hugging Face transformers. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM, _THETA = 128, 5e5  # transformers' defaults


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "rope_is_neox_style", True)
    bias = hf.flag(config, "use_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        tied=True,
    )


FAMILY = ModelFamily(
    name="paddleocr_vl",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"(visual|mlp_AR)\..*"),
)
