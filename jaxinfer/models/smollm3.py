"""SmolLM3: the shared decoder with layers that do not rotate, every fourth by default.

Source: ``modeling_smollm3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import rotating_layers, sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA = 2e6  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, rotates = hf.flag(config, "attention_bias", False), rotating_layers(config)
    window = sliding_window(config, None)
    if not hf.flag(config, "use_sliding_window", False):
        window = None
    windows = windows_by_layer(config, window)
    if config.get("layer_types") is None:  # layers that rotate then see the whole context
        windows = tuple(None if one else window for one in rotates)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        windows=windows,
        theta=_THETA,
        rotates=rotates,
        tied=True,
    )


FAMILY = ModelFamily(
    name="smollm3",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
