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
from jaxinfer.models.gqa import gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec

_MULTIPLE, _PARTIAL_ROTARY = 4, 1.0  # transformers' defaults
_NAMES = TensorNames(
    embed="gpt_neox_japanese.embed_in",
    layer="gpt_neox_japanese.layers.{}.",
    final_norm="gpt_neox_japanese.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    packed=True,
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    multiple = hf.positive_int(config, "intermediate_multiple_size", _MULTIPLE)
    part = hf.positive_float(config, "rotary_pct", _PARTIAL_ROTARY)
    rope = rope_config(config, width // heads, theta_key="rotary_emb_base", partial=part)
    decoder = gqa_config(
        hf.with_values(config, {"intermediate_size": multiple * width}),
        dtype,
        rope=rope,
        head_dim=width // heads,
        gated=False,
        activation=hf.activation(config, "hidden_act", "gelu"),
        norm="layer",
        tied=True,
    )
    last = len(decoder.layers) - 1
    mixer = decoder.layers[last].mixer
    assert isinstance(mixer, AttentionConfig)
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
        for spec in gqa_param_specs(config, names=_NAMES)
    )


FAMILY = ModelFamily(
    name="gpt_neox_japanese",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        r"gpt_neox_japanese\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"embed_out\.weight",
    ),
)
