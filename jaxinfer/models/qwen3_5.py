"""Qwen3.5 to 3.8 (text): the gated delta rule in three of four layers, else gated attention.

Source: ``modeling_qwen3_5`` of Hugging Face transformers. Norms but that of the delta rule multiply
by 1 + w in float32. Tensors for images and for the prediction of several tokens are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import delta_config, delta_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.params import plus_one, stack_plus_one
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardSpec

# transformers' defaults
_HEAD_DIM, _ROTATED, _INTERVAL = 256, 0.25, 4

_DELTA, _FULL = "linear_attention", "full_attention"
NORMS = NormSources(one=plus_one, several=stack_plus_one)
IGNORED_TENSORS = (*GQA_IGNORED_TENSORS, r"model\.visual\..*")


def hybrid_config(
    config: Mapping[str, Any], dtype: jnp.dtype, ffns: list[FeedForwardSpec] | None = None
) -> DecoderSpec:
    """A decoder whose layers are of gated attention or of the gated delta rule.

    ``ffns`` are the networks of the layers, by default dense ones. Raises ``ConfigError`` with the
    key.
    """
    hf.supported_only(config, "attn_output_gate", True)
    bias, kinds = hf.flag(config, "attention_bias", False), _layer_kinds(config)
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        partial_rotary=_ROTATED,
        windows=(None,) * len(kinds),
        norm_dtype=jnp.dtype(jnp.float32),
        ffns=ffns,
    )
    delta = delta_config(config) if _DELTA in kinds else None
    layers = []
    for layer, kind in zip(decoder.layers, kinds, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        mixer = replace(layer.mixer, gate=True) if kind == _FULL else delta
        layers.append(replace(layer, mixer=mixer))
    return replace(decoder, layers=tuple(layers))


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; by default every fourth has attention."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    interval = hf.positive_int(config, "full_attention_interval", _INTERVAL)
    kinds = config.get("layer_types")
    if kinds is None:
        return [_DELTA if (i + 1) % interval else _FULL for i in range(num_layers)]
    known = isinstance(kinds, list | tuple) and all(kind in (_DELTA, _FULL) for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ConfigError(
            f"config key 'layer_types' must hold {_DELTA!r} or {_FULL!r} for each of the "
            f"{num_layers} layers"
        )
    return list(kinds)


FAMILY = ModelFamily(
    name="qwen3_5",
    config_from_hf=hybrid_config,
    param_specs=partial(gqa_param_specs, norms=NORMS, mixers=delta_specs),
    ignored_tensors=IGNORED_TENSORS,
    optional_prefix="model.language_model.",
)
