"""Ling 3 (BailingMoeV3, bailing_hybrid): the delta rule with a decay of each channel, or latent
attention whose heads have gates.

Decays are bounded ("safe gates"). Experts are those of Ling 2.0, the last layer of each group has
attention. Source: ``modeling_bailing_hybrid`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.bailing_parts import TENSORS
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import channel_gates_delta_specs
from jaxinfer.models.experts import (
    expert_specs,
    experts_config,
    grouped_routing,
    networks_by_layer,
)
from jaxinfer.models.hf_rope import rope_config, section_theta
from jaxinfer.models.hybrid import DELTA, FULL
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    LatentNames,
    latent_attention,
    latent_decoder,
    latent_param_specs,
    shared_experts,
)
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, LayerSpec, MixerSpec
from jaxinfer.nn.mixers.delta_spec import DeltaConfig

# Keys of published files, and the names under which transformers saves them.
_SAVED = MappingProxyType(
    {
        "n_group": "num_expert_group",
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
)
_DEFAULTS = MappingProxyType(
    {
        **{"n_group": 8, "topk_group": 4, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "q_lora_rank": None, "first_k_dense_replace": 2},
    }
)
_THETA = 6e6
_NAMES = LatentNames(embed="model.word_embeddings", own="attention.", o="dense")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config = hf.with_defaults(_one_name_each(config), _DEFAULTS)
    config = hf.with_values(section_theta(config), {"tie_word_embeddings": False})  # never tied
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    hf.supported_only(config, "no_kda_lora", True)
    hf.supported_only(config, "gated_attention_proj_granularity_type", "head_wise")
    for key in ("mtp_loss_scaling_factor", "linear_num_heads", "linear_conv_kernel_dim"):
        config.get(key)  # of training, and those that transformers derives
    rope = rope_config(config, hf.positive_int(config, "qk_rope_head_dim"), theta=_THETA)
    attention = replace(latent_attention(config, rope, query_rank=None), head_gate=True)
    mixers: dict[str, MixerSpec] = {FULL: attention, DELTA: _delta(config)}
    ffns = networks_by_layer(config, _experts(config), first=2)
    layers = (LayerSpec(mixers[kind], ffn) for kind, ffn in zip(_kinds(config), ffns, strict=True))
    lengths = rope.lengths(hf.positive_int(config, "max_position_embeddings"))
    return latent_decoder(config, dtype, tuple(layers), lengths)


def _one_name_each(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the published names of keys."""
    length = hf.first_of(config, "max_position_embeddings", "model_max_length")
    norm = "moe_renormalize" if "moe_renormalize" in config else "norm_topk_prob"
    values: dict[str, Any] = {
        "max_position_embeddings": hf.positive_int(config, length),
        "norm_topk_prob": hf.flag(config, norm, True),
    }
    for name, saved in _SAVED.items():
        one, other = config.get(name), config.get(saved)
        if None not in (one, other) and one != other:
            raise ConfigError(
                f"config key {saved!r} is {short(other)}, and {name!r}, its other name, is "
                f"{short(one)}; make them equal or remove one"
            )
        if other is not None:
            values[name] = other
    return hf.with_values(config, values)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: the last one of a group has attention."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    size = hf.positive_int(config, "layer_group_size", 6)
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (DELTA, FULL))
    if kinds is None and num_layers % size:
        raise ConfigError(
            f"config key 'num_hidden_layers' {num_layers} is not a multiple of "
            f"'layer_group_size' {size}; name the kind of each layer by 'layer_types'"
        )
    return kinds or [DELTA if (i + 1) % size else FULL for i in range(num_layers)]


def _delta(config: Mapping[str, Any]) -> DeltaConfig:
    """The mixer with the delta rule."""
    heads = hf.positive_int(config, "num_attention_heads")
    config.get("head_dim")  # of other heads, in files of transformers, which have the first name
    own = hf.first_of(config, "linear_head_dim", "head_dim")
    width, floor = hf.positive_int(config, own, 128), config.get("kda_lower_bound", -5.0)
    bounded = hf.flag(config, "kda_safe_gate", True)
    if bounded and not (isinstance(floor, float | int) and -1e4 < floor < 0):
        raise ConfigError(
            f"config key 'kda_lower_bound' must be negative, and above -10000, got {short(floor)}"
        )
    return DeltaConfig(
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=width,
        v_dim=width,
        conv_width=hf.positive_int(config, "short_conv_kernel_size", 4),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        decay="channel",
        gate_act="sigmoid",
        decay_floor=float(floor) if bounded else None,
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    hf.supported_only(config, "score_function", "sigmoid")
    width = hf.positive_int(config, "moe_intermediate_size")
    hf.supported_only(config, "moe_shared_expert_intermediate_size", width)
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = config.get(key)
        if limits is not None and not (isinstance(limits, list) and not any(limits)):
            raise ConfigError(f"config key {key!r} limits activations, which is not supported")
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(config, "sigmoid"),
        choice_bias=True,
        shared=shared_experts(config),
    )


FAMILY = ModelFamily(
    name="bailing_hybrid",
    config_from_hf=config_from_hf,
    param_specs=partial(
        latent_param_specs,
        experts=partial(expert_specs, names=TENSORS),
        mixers=channel_gates_delta_specs,
        names=_NAMES,
    ),
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
