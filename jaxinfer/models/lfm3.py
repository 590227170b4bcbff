"""LFM3: LFM2's convolutions, windows in some layers, norms after blocks, a gate of each head.

Source: ``modeling_lfm3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gated_conv import conv_mixer, conv_param_specs
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec

_CONV, _FULL, _SLIDING = "conv", "full_attention", "sliding_attention"
# transformers' defaults
_HEAD_DIM, _WINDOW, _TAPS, _EPS, _THETA = 128, 256, 7, 1e-5, 1e6
_DEFAULT_ROPES = MappingProxyType(
    {
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
    }
)
_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    into=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    gate="self_attn.g_proj",
)
_BEFORE = NormSources(("operator_norm", "ffn_norm"))
_BOTH = NormSources(("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    default = [
        _SLIDING if i and i % 4 == 0 else _FULL if i % 4 == 2 else _CONV for i in range(num_layers)
    ]
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (_CONV, _FULL, _SLIDING)) or default
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = hf.with_values(config, {"rope_parameters": _DEFAULT_ROPES})
    rope, local = ropes_by_kind(config, head_dim, theta=_THETA)
    window = sliding_window(config, _WINDOW) if _SLIDING in kinds else None
    config.get("sliding_window")
    bias = hf.flag(config, "attention_bias", False)
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=tuple(window if kind == _SLIDING else None for kind in kinds),
        rope=rope,
        local_rope=local,
        activation="silu",
        norms="both" if hf.flag(config, "use_sandwich_norm", True) else "before",
        norm_eps=hf.positive_float(config, "norm_eps", _EPS),
        tied=True,
        attention={"head_gate": hf.flag(config, "use_attention_gate", True)},
    )
    conv = conv_mixer(config, decoder.hidden_size, _TAPS)
    return with_mixers(decoder, {i: conv for i, kind in enumerate(kinds) if kind == _CONV})


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the norms that the layers have."""
    norms = _BOTH if config.layers[0].norms == "both" else _BEFORE
    return gqa_param_specs(config, norms=norms, names=_NAMES, mixers=conv_param_specs)


FAMILY = ModelFamily(
    name="lfm3",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
