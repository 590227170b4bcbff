"""OLMo 3: OLMo 2 with windows in three of four layers; only the others have a scaled rope.

Source: ``modeling_olmo3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA, _PATTERN = 5e5, 4  # transformers' defaults
_NORMS = NormSources(names=("post_attention_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, heads = (
        hf.flag(config, "attention_bias", False),
        hf.positive_int(config, "num_attention_heads"),
    )
    head_dim = hf.positive_int(config, "head_dim", hf.positive_int(config, "hidden_size") // heads)
    rope, local_rope = ropes_by_kind(config, head_dim, theta=_THETA)
    window, num_layers = sliding_window(config), hf.positive_int(config, "num_hidden_layers")
    windows = tuple(window if (i + 1) % _PATTERN else None for i in range(num_layers))
    if config.get("layer_types") is not None:
        windows = windows_by_layer(config, window)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all_heads",
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        norms="after",
    )


FAMILY = ModelFamily(
    name="olmo3",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
