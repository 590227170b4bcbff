"""Molmo 2's text decoder: Qwen3, or with norms after blocks and of all heads; only some layers may
scale their rope.

Source: ``modeling_molmo2`` of Hugging Face transformers, and its ``conversion_mapping`` for the
names of published files. Tensors for images and the tokens that stand for them are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import PackedHeads, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardConfig

_HEAD_DIM = 128  # transformers' default
_NAMES = TensorNames(
    embed="model.transformer.wte.embedding",
    layer="model.transformer.blocks.{}.",
    final_norm="model.transformer.ln_f",
    qkv=("self_attn.att_proj",),
    o="self_attn.attn_out",
    into=("mlp.ff_proj",),
    down="mlp.ff_out",
)
_NORMS = NormSources(("attn_norm", "ff_norm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("additional_vocab_size")  # of tokens that stand for images
    hf.supported_only(config, "qk_norm_type", "qwen3", "olmo")
    num_layers = hf.positive_int(config, "num_hidden_layers")
    bias = hf.flag(config, hf.first_of(config, "attention_bias", "qkv_bias"), False)
    eps = hf.positive_float(config, hf.first_of(config, "rms_norm_eps", "layer_norm_eps"))
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        qk_norm="all_heads" if config.get("qk_norm_type") == "olmo" else "head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        norm_eps=eps,
        norms="after" if hf.flag(config, "norm_after", False) else "before",
    )
    scaled, layers = _scaled_layers(config, num_layers), []
    for i, layer in enumerate(decoder.layers):
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig) and mixer.rope is not None
        rope = mixer.rope if i in scaled else replace(mixer.rope, scaling=None)
        layers.append(replace(layer, mixer=replace(mixer, rope=rope)))
    return replace(decoder, layers=tuple(layers))


def _scaled_layers(config: Mapping[str, Any], num_layers: int) -> set[int]:
    """The layers whose rope is scaled, if the config has a scaling; by default all."""
    listed = config.get("rope_scaling_layers")
    if listed is None:
        return set(range(num_layers))
    if not isinstance(listed, list | tuple) or not all(type(one) is int for one in listed):
        raise ConfigError(
            f"config key 'rope_scaling_layers' must be a list of layers, got {short(listed)}"
        )
    return set(listed)


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; a table of tokens has no ".weight", and ups are before gates."""
    ffn = config.layers[0].ffn
    assert isinstance(ffn, FeedForwardConfig)
    order = PackedHeads(1, (ffn.width, ffn.width), (1, 0))

    def renamed(source: Source) -> Source:
        if source.name.endswith("mlp.ff_proj.weight"):
            return source._replace(rows=order)
        return source._replace(name=source.name.replace("wte.embedding.weight", "wte.embedding"))

    return tuple(
        replace(spec, sources=tuple(map(renamed, spec.sources)))
        for spec in gqa_param_specs(config, norms=_NORMS, names=_NAMES)
    )


FAMILY = ModelFamily(
    name="molmo2",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.transformer\.wte\.new_embedding",
        r"model\.vision_backbone\..*",
    ),
)
