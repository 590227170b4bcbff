"""Granite with windows, sinks, and a base of the rope of each layer, or none.

Source: ``modeling_granite_swa`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import granite
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, LayerSpec

_WINDOW, _PATTERN = 128, 4  # transformers' defaults


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    windows, own = _windows(config), hf.with_values(config, {"layer_types": None})
    spec = granite.config_from_hf(own, dtype)
    if "tie_word_embeddings" not in config:
        spec = replace(spec, tie_word_embeddings=True)
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        thetas = [None] * len(windows)
    is_list = isinstance(thetas, list | tuple) and len(thetas) == len(windows)
    if not is_list or not all(t in (None, 0) or hf.is_positive(t) for t in thetas):
        raise ConfigError(
            f"config key 'layer_rope_theta' is {short(thetas)}; it must be a number from 0 for "
            f"each of the {len(windows)} layers"
        )
    triples = zip(spec.layers, windows, thetas, strict=True)
    return replace(spec, layers=tuple(_layer(*triple) for triple in triples))


def _layer(layer: LayerSpec, window: int | None, theta: float | None) -> LayerSpec:
    """A layer with its window and sinks; with a base of 0 it does not rotate, None is the common
    one.
    """
    mixer = layer.mixer
    assert isinstance(mixer, AttentionConfig) and mixer.rope is not None
    rope = mixer.rope if theta is None else replace(mixer.rope, theta=float(theta))
    return replace(
        layer, mixer=replace(mixer, window=window, sinks=True, rope=None if theta == 0 else rope)
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer, from the first on, has none."""
    window = sliding_window(config, _WINDOW)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if i % _PATTERN else None for i in range(num_layers))


FAMILY = ModelFamily(
    name="granite_swa",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
