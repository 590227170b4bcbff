"""Cohere Compass (North Micro): Cohere 2 with a rope, or none, of each kind of layer.

Heads rotate by halves.

Source: ``modeling_cohere_compass`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import SECTIONS, ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA, _EPS = 1e4, 1e-5  # transformers' defaults
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NORMS = NormSources(names=("input_layernorm",))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("pooling")  # of embeddings
    bias, head_dim = hf.flag(config, "attention_bias", False), hf.head_dim(config)
    window = sliding_window(config) if config.get("layer_types") is not None else None
    windows = windows_by_layer(config, window)
    given, still = config.get(SECTIONS[1]), set[str]()
    if isinstance(given, Mapping) and {_FULL, _SLIDING} & given.keys():
        still = {kind for kind, one in given.items() if one is None}
        own = {kind: one for kind, one in given.items() if isinstance(one, Mapping)}
        config = hf.with_values(config, {SECTIONS[1]: own})
    rope, local = ropes_by_kind(config, head_dim, theta=_THETA)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        local_rope=local,
        rotates=[(_FULL if one is None else _SLIDING) not in still for one in windows],
        norms="shared",
        norm="layer_weight",
        norm_eps=hf.positive_float(config, "layer_norm_eps", _EPS),
        parallel=True,
        tied=True,
        logit_scale=hf.positive_float(config, "logit_scale", 1.0),
    )


FAMILY = ModelFamily(
    name="cohere_compass",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
