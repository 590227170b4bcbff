"""Laguna (poolside): heads whose number depends on the layer, gates of heads by softplus, experts.

Source: ``modeling_laguna`` of Hugging Face transformers.
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
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    gated_network,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import SECTIONS, ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
)
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _WINDOW, _SHARED_WIDTH = 128, 512, 512
_THETA, _LOCAL_THETA, _ROTATED = 5e5, 1e4, 0.5
_TENSORS = ExpertTensors(
    choice_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert."
)
_NAMES = TensorNames(gate="self_attn.g_proj")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_apply_router_weight_on_input", False)
    hf.supported_only(config, "moe_router_logit_softcapping", 0.0)
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    window = sliding_window(config, _WINDOW)
    windows = windows_by_layer(config, window if config.get("layer_types") else None)
    given = any(config.get(place) for place in SECTIONS)
    rope, local = ropes_by_kind(
        config,
        head_dim,
        theta=_THETA,
        local_theta=_LOCAL_THETA,
        partials=(1.0 if given else _ROTATED, 1.0),
    )
    heads = _heads(config, len(windows))
    decoder = gqa_config(
        hf.with_values(config, {"num_attention_heads": heads[0]}),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        local_rope=local,
        ffns=networks_by_layer(config, _experts(config), first=1),
        attention=_gate(config),
    )
    kv_heads, layers = hf.positive_int(config, "num_key_value_heads", 8), []
    for layer, own in zip(decoder.layers, heads, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        if own % kv_heads:
            raise ConfigError(
                f"config key 'num_attention_heads_per_layer' has {own}, which is not a multiple of "
                f"'num_key_value_heads' {kv_heads}"
            )
        layers.append(replace(layer, mixer=replace(layer.mixer, num_heads=own)))
    return replace(decoder, layers=tuple(layers))


def _heads(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The query heads of each layer."""
    common = hf.positive_int(config, "num_attention_heads")
    given = config.get("num_attention_heads_per_layer")
    if given is None:
        return [common] * num_layers
    fits = isinstance(given, list | tuple) and len(given) == num_layers
    if not fits or not all(type(one) is int and 0 < one <= hf.MAX_HEAD_DIM for one in given):
        raise ConfigError(
            "config key 'num_attention_heads_per_layer' must hold a number of heads for each of "
            f"the {num_layers} layers, got {short(given)}"
        )
    return list(given)


def _gate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The gates of heads' outputs: one of each head, or of each element."""
    given = config.get("gating", True)
    if given not in (True, "per-head", "per-element"):
        raise ConfigError(
            f"config key 'gating' is {short(given)}; known are true, 'per-head' and 'per-element'"
        )
    kind = "gate" if given == "per-element" else "head_gate"
    return {kind: True, "gate_act": "softplus", "gate_bias": False}


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    width = hf.positive_int(config, "shared_expert_intermediate_size", _SHARED_WIDTH)
    routing = Routing(
        chosen=hf.positive_int(config, "num_experts_per_tok", 8),
        scores="sigmoid",
        renormalised=True,
        scale=hf.positive_float(config, "moe_routed_scaling_factor", 1.0),
    )
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=routing,
        choice_bias=True,
        shared=gated_network(config, width),
    )


FAMILY = ModelFamily(
    name="laguna",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, names=_NAMES, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
