"""Gemma 3n (text): alternating updates of several residual streams, inputs of single layers, layers
that use the keys and values of an earlier one, networks with few active gates.

Source: ``modeling_gemma3n`` of Hugging Face transformers. Scores are not scaled. Parts for images
and audio are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gemma_parts import IGNORED_TENSORS, input_specs, key_layers, shared_specs
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, join_outputs, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.altup_spec import AltUpEndConfig, AltUpMixerConfig, AltUpResidual
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
)
from jaxinfer.nn.layer_spec import LayerInputsConfig
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig

# transformers' defaults
_HEAD_DIM, _WINDOW, _PATTERN = 256, 512, 5
_SHARED, _INPUT, _INPUT_TOKENS, _STREAMS, _RANK = 15, 256, 262_144, 4, 64
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_THETA, _LOCAL_THETA, _LOCAL_KEY = 1e6, 1e4, "rope_local_base_freq"
# Keys of training, and a scale that scores do not have.
_UNUSED = ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")

_NORMS = NormSources(("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _UNUSED:
        config.get(key)
    windows, inputs = _windows(config), _layer_inputs(config)
    shared = hf.layer_index(config, "num_kv_shared_layers", _SHARED)
    sources = key_layers(hf.with_values(config, {"num_kv_shared_layers": shared}), windows)
    activation = hf.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    rope, local_rope = ropes_by_kind(
        config, head_dim, theta=_THETA, local_theta=_LOCAL_THETA, local_key=_LOCAL_KEY
    )
    count, active = _streams(config)
    rank = hf.positive_int(config, "laurel_rank", _RANK)
    scaled, cap = hf.flag(config, "altup_correct_scale", True), _cap(config)
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        tied=True,
        scale=1.0,
        ffns=_networks(config, activation),
        attention={"values": "normalised"},
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
        layer_inputs=inputs,
        logit_cap=cap,
        residual=AltUpResidual(count),
    )
    end = AltUpEndConfig(activation, count, active, scaled)
    layers: list[LayerSpec] = []
    for layer, source in zip(decoder.layers, sources, strict=True):
        own = layer.mixer
        assert isinstance(own, AttentionConfig)
        attention = own if source is None else SharedAttentionConfig(attention=own, of=source)
        mixer = AltUpMixerConfig(attention=attention, count=count, active=active, laurel_rank=rank)
        layers.append(replace(layer, mixer=mixer, norms="ffn_both", end=end))
    return replace(decoder, layers=tuple(layers))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fifth has none."""
    window = hf.positive_int(config, "sliding_window", _WINDOW)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if (i + 1) % _PATTERN else None for i in range(num_layers))


def _layer_inputs(config: Mapping[str, Any]) -> LayerInputsConfig:
    """The inputs of single layers."""
    return LayerInputsConfig(
        width=hf.positive_int(config, "hidden_size_per_layer_input", _INPUT),
        num_layers=hf.positive_int(config, "num_hidden_layers"),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        num_tokens=hf.positive_int(config, "vocab_size_per_layer_input", _INPUT_TOKENS),
    )


def _streams(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of streams, and the one that blocks compute."""
    count = hf.positive_int(config, "altup_num_inputs", _STREAMS)
    active = hf.layer_index(config, "altup_active_idx", 0)
    if count < 2 or active >= count:
        raise ConfigError(
            f"config key 'altup_num_inputs' is {count}, and there must be two streams or more, one "
            f"of which is number {active} ('altup_active_idx'); correct these numbers"
        )
    return count, active


def _cap(config: Mapping[str, Any]) -> float | None:
    """The limit of logits: null is none."""
    if "final_logit_softcapping" in config and config["final_logit_softcapping"] is None:
        return None
    return hf.positive_float(config, "final_logit_softcapping", 30.0)


def _networks(config: Mapping[str, Any], activation: str) -> list[FeedForwardSpec]:
    """The network of each layer, with its own width and its own part of gates that are not 0."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    widths = config.get("intermediate_size")
    if not isinstance(widths, list | tuple):
        widths = [hf.positive_int(config, "intermediate_size")] * num_layers
    parts = config.get("activation_sparsity_pattern")
    if parts is None:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        parts = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    if len(widths) != num_layers or not all(type(w) is int and hf.is_positive(w) for w in widths):
        raise ConfigError(
            f"config key 'intermediate_size' is {short(widths)}, and there are {num_layers} layers"
        )
    fits = isinstance(parts, list | tuple) and len(parts) == num_layers
    if not fits or not all(type(p) in (int, float) and 0 <= p < 1 for p in parts):
        raise ConfigError(
            "config key 'activation_sparsity_pattern' must be a number from 0 to below 1 for each "
            f"of the {num_layers} layers, got {short(parts)}"
        )
    return [
        FeedForwardConfig(
            width=width,
            activation=activation,
            gated=True,
            gate_cutoff=NormalDist().inv_cdf(part) if part else None,
        )
        for width, part in zip(widths, parts, strict=True)
    ]


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``, with Hugging Face's names of their sources."""
    d, inputs = config.hidden_size, config.layer_inputs
    assert isinstance(inputs, LayerInputsConfig) and isinstance(config.residual, AltUpResidual)
    mixers = [layer.mixer for layer in config.layers]
    plain = [
        replace(layer, mixer=mixer.attention) if isinstance(mixer, AltUpMixerConfig) else layer
        for layer, mixer in zip(config.layers, mixers, strict=True)
    ]
    own = replace(config, layers=tuple(plain))
    specs = list(gqa_param_specs(own, norms=_NORMS, mixers=shared_specs))
    for i, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, AltUpMixerConfig) and isinstance(layer.end, AltUpEndConfig)
        path, source = f"layers_{i}/", f"model.layers.{i}."
        specs += _layer_specs(path, source, layer.mixer, layer.end, d, inputs.width)
    specs.extend(input_specs(inputs, d))
    for name, tensor in (("into", "altup_projections"), ("out", "altup_unembed_projections")):
        count = config.residual.count - 1
        sources = tuple(Source(f"model.{tensor}.{i}.weight", (d, d)) for i in range(count))
        array = ArraySpec((count, d, d), (None, None, None))
        specs.append(ParamSpec(f"residual/{name}", array, sources, stack))
    return tuple(specs)


def _layer_specs(
    path: str, source: str, mixer: AltUpMixerConfig, end: AltUpEndConfig, d: int, p: int
) -> list[ParamSpec]:
    """The parameters of ``nn.altup`` within those of a layer, with inputs of width ``p``."""
    n, r, whole = mixer.count, mixer.laurel_rank, (None, None)
    linears = (
        Linear("laurel_left", ("laurel.linear_left",), (d, r), whole, bias=False),
        Linear("laurel_right", ("laurel.linear_right",), (r, d), whole, bias=False),
        Linear("end_gate", ("per_layer_input_gate",), (d, p), whole, bias=False),
        Linear("end_projection", ("per_layer_projection",), (p, d), whole, bias=False),
    )
    specs = list(linear_specs(path, source, linears)[0])
    small = {
        "altup_router": ("altup.modality_router", (n, d)),
        "predict": ("altup.prediction_coefs", (n * n, n)),
        "correct": ("altup.correction_coefs", (n, n)),
    }
    for name, (tensor, shape) in small.items():  # never quantised
        array, own = ArraySpec(shape[::-1], whole), (Source(f"{source}{tensor}.weight", shape),)
        specs.append(ParamSpec(path + name, array, own, join_outputs))
    norms = {
        "altup_norm": ("altup.router_norm",),
        "laurel_norms": ("post_attention_layernorm", "laurel.post_laurel_norm"),
        "end_norm": ("post_per_layer_input_norm",),
    }
    for name, tensors in norms.items():
        own = tuple(Source(f"{source}{tensor}.weight", (d,)) for tensor in tensors)
        specs.append(ParamSpec(path + name, ArraySpec((len(own), d), whole), own, stack))
    if end.scaled:
        scale = (Source(f"{source}altup.correct_output_scale", (d,)),)
        specs.append(ParamSpec(f"{path}correct_scale", ArraySpec((d,), (None,)), scale, as_is))
    return specs


FAMILY = ModelFamily(
    name="gemma3n",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(
        *IGNORED_TENSORS,
        r"model\.layers\.\d+\.altup\.correct_output_scale",  # where it is not used
    ),
    optional_prefix="model.language_model.",
)
