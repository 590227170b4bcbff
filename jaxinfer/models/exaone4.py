"""EXAONE 4 and the text of 4.5: norms after blocks and of heads.

Where some layers have windows, the others do not rotate.

Source: ``modeling_exaone4`` of Hugging Face transformers.
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
    NormSources,
    gqa_config,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.nn.decoder_config import DecoderSpec

_PATTERN = 4  # transformers' default
_NORMS = NormSources(names=("post_attention_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    windows = _windows(config)
    has_windows = config.get("sliding_window", _PATTERN) is not None
    return gqa_config(
        config,
        dtype,
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        windows=windows,
        rotates=[window is not None or not has_windows for window in windows],
        norms="after",
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer has none."""
    window, pattern = sliding_window(config), config.get("sliding_window_pattern")
    if window is None or config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    if isinstance(pattern, str) and pattern and not {*pattern} - {"L", "G"}:  # local, global
        letters = (pattern[i % len(pattern)] for i in range(num_layers))
        return tuple(window if letter == "L" else None for letter in letters)
    every = hf.positive_int(config, "sliding_window_pattern", _PATTERN)
    return tuple(window if (i + 1) % every else None for i in range(num_layers))


FAMILY = ModelFamily(
    name="exaone4",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"(model\.)?visual\..*", r"mtp\..*"),
    optional_prefix="model.language_model.",  # of EXAONE 4.5
)
