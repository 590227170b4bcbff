"""SmolLM3: the shared decoder with layers that do not rotate, every fourth by default.

Source: ``modeling_smollm3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import DecoderSpec

_INTERVAL, _THETA = 4, 2e6  # transformers' defaults


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
        qk_norm=None,
        windows=windows,
        theta=_THETA,
        rotates=rotates,
        tied=True,
    )


def rotating_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers rotate: by ``no_rope_layers``, or else by ``no_rope_layer_interval``."""
    given, num_layers = config.get("no_rope_layers"), hf.positive_int(config, "num_hidden_layers")
    interval = hf.positive_int(config, "no_rope_layer_interval", _INTERVAL)
    if given is None:
        return [(i + 1) % interval > 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or {*given} - {0, 1}:
        raise ConfigError(
            "config key 'no_rope_layers' must hold 1 (rotates) or 0 for each of the "
            f"{num_layers} layers, got {short(given)}"
        )
    return [one == 1 for one in given]


FAMILY = ModelFamily(
    name="smollm3",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
