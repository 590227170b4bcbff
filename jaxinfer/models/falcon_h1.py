"""Falcon-H1: attention and Mamba-2 beside each other in every layer, with multipliers.

Source: ``modeling_falcon_h1`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.mamba import mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardConfig
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from jaxinfer.nn.mixers.side_by_side_spec import Scales, SideBySideConfig

_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    into=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_INNER = 1024  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    hf.supported_only(config, "mamba_use_mlp", True)
    for unused in ("num_logits_to_keep", "mlp_expansion_factor"):
        config.get(unused)
    bias = hf.flag(config, "attention_bias", False)
    num_layers, head_dim = hf.positive_int(config, "num_hidden_layers"), hf.head_dim(config)
    # queries times the multiplied keys are multiplied queries times keys
    scale = _factor(config, "key_multiplier") * head_dim**-0.5
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=head_dim,
        scale=scale,
        ffns=[_network(config)] * num_layers,
        embed_scale=_factor(config, "embedding_multiplier"),
        logit_scale=_factor(config, "lm_head_multiplier"),
    )
    mamba, layers = _mamba(config), []
    for layer in decoder.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        mixer = SideBySideConfig(
            attention=layer.mixer,
            other=mamba,
            attention_scales=_scales(config, "attention"),
            other_scales=_scales(config, "ssm"),
        )
        layers.append(replace(layer, mixer=mixer))
    return replace(decoder, layers=tuple(layers))


def _factor(config: Mapping[str, Any], key: str) -> float:
    return hf.positive_float(config, key, 1.0)


def _scales(config: Mapping[str, Any], name: str) -> Scales:
    """The multipliers of a mixer's input and output."""
    return Scales(*(_factor(config, f"{name}_{side}_multiplier") for side in ("in", "out")))


def _factors(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """So many multipliers; by default each is 1."""
    given = config.get(key)
    if given is None:
        return (1.0,) * count
    if (
        not isinstance(given, list | tuple)
        or len(given) != count
        or not all(map(hf.is_positive, given))
    ):
        raise ConfigError(
            f"config key {key!r} must be {count} positive numbers, got {short(given)}"
        )
    return tuple(map(float, given))


def _network(config: Mapping[str, Any]) -> FeedForwardConfig:
    """The network of each layer, whose gate and whose output are multiplied."""
    gate, out = _factors(config, "mlp_multipliers", 2)
    return FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation="silu",
        gated=True,
        bias=hf.flag(config, "mlp_bias", False),
        gate_scale=gate,
        out_scale=out,
    )


def _mamba(config: Mapping[str, Any]) -> Mamba2Config:
    """The mixer beside attention, which may have no norm."""
    before = hf.flag(config, "mamba_norm_before_gate", True)
    has_norm = hf.flag(config, "mamba_rms_norm", False)
    inner: int | None = _INNER
    if "mamba_d_ssm" in config:  # null: as the key of the expansion says
        inner = config["mamba_d_ssm"] and hf.positive_int(config, "mamba_d_ssm")
    multipliers = _factors(config, "ssm_multipliers", 5)
    return mamba2_config(
        config,
        inner=inner,
        norm=("before_gate" if before else "after_gate") if has_norm else None,
        o_bias=hf.flag(config, "projectors_bias", False),
        multipliers=None if set(multipliers) == {1.0} else multipliers,
    )


FAMILY = ModelFamily(
    name="falcon_h1",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("input_layernorm", "pre_ff_layernorm")),
        names=_NAMES,
        mixers=mamba2_specs,
    ),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.mamba\.mup_vector"),
)
