"""Granite 3 (dense, mixtures): factors on embeddings, blocks' outputs, scores and logits.

GraniteSWA and GraniteMoeSWA have windows, sinks, and a base of the rope of each layer, or none.

Source: ``modeling_granite``, ``modeling_granite_swa``, ``modeling_granitemoe``,
``modeling_granitemoeshared`` and ``modeling_granitemoe_swa`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, experts_per_token, gated_network
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_param_specs
from jaxinfer.models.granite_parts import SWA_TENSORS, granite_config, granite_expert_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardConfig, LayerSpec
from pallas_kernels.route.routing import Routing

_SHARED = ("GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM")
_MIXTURES = ("GraniteMoeForCausalLM", *_SHARED)
_SWA = ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM")
_WINDOW, _PATTERN = 128, 4  # transformers' defaults of GraniteSWA


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "position_embedding_type", "rope")
    names = config.get("architectures", ())
    is_swa = any(name in names for name in _SWA)
    windows = _windows(config) if is_swa else windows_by_layer(config, None)
    bias, ffns = hf.flag(config, "attention_bias", False), None
    if any(name in names for name in _MIXTURES):
        # the softmax is over the logits of the chosen experts
        routing = Routing(experts_per_token(config), renormalised=True)
        width = "intermediate_size"
        experts = experts_config(config, count="num_local_experts", width=width, routing=routing)
        if any(name in names for name in _SHARED):
            experts = replace(experts, shared=_shared(config))
        ffns = [experts] * len(windows)
    spec = granite_config(
        config,
        dtype,
        bias=bias,
        mlp_bias=ffns is None and hf.flag(config, "mlp_bias", False),
        windows=windows,
        ffns=ffns,
        tied=is_swa,
        sinks=is_swa,
    )
    if not is_swa:
        return spec
    pairs = zip(spec.layers, _thetas(config, len(windows)), strict=True)
    return replace(spec, layers=tuple(_with_base(*pair) for pair in pairs))


def _thetas(config: Mapping[str, Any], num_layers: int) -> Sequence[float | None]:
    """The base of each layer's rope: 0 without one, None for the common one."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [None] * num_layers
    is_list = isinstance(thetas, list | tuple) and len(thetas) == num_layers
    if not is_list or not all(theta == 0 or hf.is_positive(theta) for theta in thetas):
        raise ConfigError(
            f"config key 'layer_rope_theta' is {short(thetas)}; it must be a number from 0 for "
            f"each of the {num_layers} layers"
        )
    return thetas


def _with_base(layer: LayerSpec, theta: float | None) -> LayerSpec:
    """The layer with that base."""
    mixer = layer.mixer
    if theta is None:
        return layer
    assert isinstance(mixer, AttentionConfig) and mixer.rope is not None
    rope = replace(mixer.rope, theta=float(theta)) if theta else None
    return replace(layer, mixer=replace(mixer, rope=rope))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer, from the first on, has none."""
    window = sliding_window(config, _WINDOW)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if i % _PATTERN else None for i in range(num_layers))


def _shared(config: Mapping[str, Any]) -> FeedForwardConfig | None:
    """The network of all tokens, if there is one."""
    width = hf.layer_index(config, "shared_intermediate_size", 0)
    return gated_network(config, width) if width else None


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; the mixtures with sinks are the newer ones, with names of their own."""
    mixer, specs = config.layers[0].mixer, granite_expert_specs
    if isinstance(mixer, AttentionConfig) and mixer.sinks:
        specs = partial(granite_expert_specs, names=SWA_TENSORS)
    return gqa_param_specs(config, experts=specs)


FAMILY = ModelFamily(
    name="granite",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
