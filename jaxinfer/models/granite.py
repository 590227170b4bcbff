"""Granite 3 and 4 (dense, mixtures): factors on embeddings, blocks' outputs, scores and logits.

GraniteSWA has windows, sinks, and a base of the rope of each layer, or none.

Source: ``modeling_granite``, ``modeling_granite_swa`` and ``modeling_granitemoe`` of Hugging Face
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    expert_axes,
    experts_config,
    experts_per_token,
    router_specs,
)
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.models.params import ParamSpec, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    LayerSpec,
    PlainResidual,
)
from pallas_kernels.route.routing import Routing

_WINDOW, _PATTERN = 128, 4  # transformers' defaults of GraniteSWA
_TENSORS = ExpertTensors(router="block_sparse_moe.router.layer")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    is_swa = "GraniteSWAForCausalLM" in config.get("architectures", ())
    windows = _windows(config) if is_swa else windows_by_layer(config, None)
    bias, ffns = hf.flag(config, "attention_bias", False), None
    if "GraniteMoeForCausalLM" in config.get("architectures", ()):
        # the softmax is over the logits of the chosen experts
        routing = Routing(experts_per_token(config), renormalised=True)
        width = "intermediate_size"
        experts = experts_config(config, count="num_local_experts", width=width, routing=routing)
        ffns = [experts] * len(windows)
    spec = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=ffns is None and hf.flag(config, "mlp_bias", False),
        qk_norm=None,
        windows=windows,
        ffns=ffns,
        scale=hf.positive_float(config, "attention_multiplier", 1.0),
        embed_scale=hf.positive_float(config, "embedding_multiplier", 1.0),
        residual=PlainResidual(scale=hf.positive_float(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.positive_float(config, "logits_scaling", 1.0),
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


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor for all gates and ups, one for all downs."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    axes = expert_axes(ffn)
    for name, tensor, shape, own_axes in (
        ("gate_up", "input_linear", (2 * ffn.width, width), axes.gate_up),
        ("down", "output_linear", (width, ffn.width), axes.down),
    ):
        stack = (ffn.count, *shape)
        tensor = f"{source}block_sparse_moe.{tensor}.weight"
        parts = tuple(Source(tensor, stack, part=i) for i in range(ffn.count))
        array = ArraySpec(stack, own_axes)
        yield ParamSpec(path + name, array, parts, join, pieces=ffn.count, matrix="experts")


FAMILY = ModelFamily(
    name="granite",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
