"""GPT-NeoX Japanese: GPT-NeoX whose blocks follow each other, with one bias, in the last layer.

Source: ``modeling_gpt_neox_japanese`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gpt_neox_parts import neox_config, neox_ignored, neox_names
from jaxinfer.models.gqa import gqa_param_specs, with_mixers
from jaxinfer.models.hf_rope import even_rotary
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec

_MULTIPLE, _PARTIAL_ROTARY = 4, 1.0  # transformers' defaults
_NAME = "gpt_neox_japanese"


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    width = hf.positive_int(config, "hidden_size")
    multiple = hf.positive_int(config, "intermediate_multiple_size", _MULTIPLE)
    own = hf.with_values(config, {"intermediate_size": multiple * width})
    decoder = neox_config(own, dtype, partial_rotary=_PARTIAL_ROTARY, tied=True)
    last = len(decoder.layers) - 1
    mixer = decoder.layers[last].mixer
    assert isinstance(mixer, AttentionConfig)
    even_rotary(mixer.rope)
    return with_mixers(decoder, {last: replace(mixer, o_bias=True)})


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; the bias of the last layer's output has a name of its own."""
    return tuple(
        replace(
            spec,
            sources=tuple(
                s._replace(name=s.name.replace("dense.bias", "dense_bias")) for s in spec.sources
            ),
        )
        for spec in gqa_param_specs(config, names=neox_names(_NAME))
    )


FAMILY = ModelFamily(
    name=_NAME,
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=neox_ignored(_NAME),
)
