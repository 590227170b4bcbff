"""CWM: Llama with windows in three of four layers.

Source: ``modeling_cwm`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import with_rope
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _THETA, _PATTERN, _WINDOW = 128, 1e6, 4, 8192
_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": _THETA,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    window, num_layers = (
        sliding_window(config, _WINDOW),
        hf.positive_int(config, "num_hidden_layers"),
    )
    windows = tuple(window if i % _PATTERN else None for i in range(num_layers))
    if config.get("layer_types") is not None:
        windows = windows_by_layer(config, window)
    return gqa_config(
        with_rope(config, _ROPE),
        dtype,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=windows,
        theta=_THETA,
    )


FAMILY = ModelFamily(
    name="cwm",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
