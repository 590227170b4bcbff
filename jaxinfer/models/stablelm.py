"""StableLM 3B and 2-1.6B: the shared decoder with LayerNorm; a quarter of each head rotates.

The 12B model, whose blocks are parallel and whose heads have norms of their own, is refused.

Source: ``modeling_stablelm`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
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

_PARTIAL_ROTARY = 0.25  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "use_parallel_residual", False)
    hf.supported_only(config, "qk_layernorm", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "use_qkv_bias", False),
        o_bias=False,
        qk_norm=None,
        windows=windows_by_layer(config, None),
        partial_rotary=_PARTIAL_ROTARY,
        norm="layer",
    )


FAMILY = ModelFamily(
    name="stablelm",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
