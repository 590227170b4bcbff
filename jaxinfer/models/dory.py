"""Dory (NVIDIA): a normalised transformer whose middle layers a token passes several times.

A pass is a part of the decoder's layers here, of which those of later passes borrow weights; each
has keys and values of its own.

Source: ``modeling_dory`` of Hugging Face transformers. Published files have each block as a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import SECTIONS, ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, LayerSpec
from jaxinfer.nn.ngpt_spec import (
    NGPTAttentionConfig,
    NGPTFeedForwardConfig,
    NGPTResidual,
    PassStartConfig,
)
from jaxinfer.nn.placement import Fused

# transformers' defaults
_THETA, _LOCAL_THETA, _WINDOW, _EVERY, _OUTER, _PASSES = 1e7, 1e4, 1024, 4, 8, 2
_RANGE, _ALPHA, _HEAD_DIM = 0.0177, 0.05, 256
_EPS = 1e-6  # which no key changes
_NETWORK, _MIDDLE = "mlp", "n_recurrent_layers"
_COUNTS = ("num_hidden_layers", "n_input_layers", _MIDDLE, "n_output_layers")
_LAYER = "backbone.layers."
_NAMES = TensorNames(
    embed="backbone.embeddings",
    layer=f"{_LAYER}{{}}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    gate="self_attn.g_proj",
)
# the blocks of a layer, and the rates after them, here and in transformers
_BLOCKS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"self_attn": (0, "mixer"), "mlp": (1, "mixer")}
)
_RATES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"lambda_1": (0, "attn_alpha"), "lambda_2": (1, "mlp_alpha")}
)
_AS_SAVED = rf"^{re.escape(_LAYER)}(\d+)\.({'|'.join((*_BLOCKS, *_RATES))})(?=\.|$)"


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "recurrent_kv_cache_mode", "per_loop")
    hf.supported_only(config, "hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias"):
        hf.supported_only(config, bias, False)
    config = _of_pairs(hf.with_values(config, {"rope_theta": None}))  # refused: each kind has one
    count, width = (hf.positive_int(config, key) for key in ("num_hidden_layers", "hidden_size"))
    window = sliding_window(config, _WINDOW)
    windows = tuple(window if (i + 1) % _EVERY else None for i in range(count))
    if config.get("layer_types") is not None:
        windows = windows_by_layer(config, window)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    # transformers' base of a section without one is not that of a config without sections
    has_sections = any(config.get(place) is not None for place in SECTIONS)
    theta = _LOCAL_THETA if has_sections else _THETA
    rope, local_rope = ropes_by_kind(config, head_dim, theta=theta, local_theta=_LOCAL_THETA)
    spread = hf.positive_float(config, "initializer_range", _RANGE)
    decoder = gqa_config(
        config,
        dtype,
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        norm="none",
        norm_eps=_EPS,
        ffns=[
            NGPTFeedForwardConfig(
                width=(inner := hf.positive_int(config, "intermediate_size")),
                activation="silu",
                gated=True,
                factor=width**0.5,
                whole=inner,
            )
        ]
        * count,
        attention={"gate": True, "gate_bias": False},
        residual=NGPTResidual(factor=hf.positive_float(config, "ngpt_alpha_init", _ALPHA) / spread),
        head_scale=1 / spread,
    )
    layers = [replace(one, mixer=_attention(one.mixer, width, spread)) for one in decoder.layers]
    return replace(decoder, layers=tuple(_passes(config, layers)))


def _of_pairs(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with a layer for each pair of attention and network, which files have apart."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or _NETWORK not in kinds:
        return config
    counts = {key: config.get(key) for key in _COUNTS}
    counts = {key: value for key, value in counts.items() if value is not None}
    if {*kinds[1::2]} != {_NETWORK} or any(hf.positive_int(config, key) % 2 for key in counts):
        raise ConfigError(
            f"config key 'layer_types' must have {_NETWORK!r} for every second block, and "
            f"{', '.join(_COUNTS)} must be even, got {short(kinds)} and {short(counts)}"
        )
    halves = {key: value // 2 for key, value in counts.items()}
    return hf.with_values(config, {**halves, "layer_types": kinds[::2]})


def _attention(mixer: Any, width: int, spread: float) -> NGPTAttentionConfig:
    """The mixer of a layer."""
    assert isinstance(mixer, AttentionConfig)
    own = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
    return NGPTAttentionConfig(
        **own,
        query_factor=mixer.head_dim**0.5 / spread,
        gate_factor=width**0.25 / spread,
        width=mixer.num_heads * mixer.head_dim,
    )


def _passes(config: Mapping[str, Any], layers: list[LayerSpec]) -> Iterator[LayerSpec]:
    """The layers as a token passes them."""
    before = hf.positive_int(config, "n_input_layers", _OUTER)
    after = hf.layer_index(config, "n_output_layers", _OUTER)
    middle = hf.positive_int(config, _MIDDLE, max(len(layers) - before - after, 1))
    if before + middle + after != len(layers):
        raise ConfigError(
            f"config key {_MIDDLE!r} is {middle}, and 'n_input_layers' {before} and "
            f"'n_output_layers' {after} do not make {len(layers)} layers with it; correct them"
        )
    passes = hf.positive_int(config, "n_recurrent_loops", _PASSES)
    yield from layers[: before - 1]
    yield replace(layers[before - 1], end=PassStartConfig(first=True))
    for number in range(passes):
        for i in range(before, before + middle):
            last = i + 1 == before + middle and number + 1 < passes
            end = PassStartConfig() if last else None
            yield replace(layers[i], end=end, weights_of=i if number else None)
    yield from layers[before + middle :]


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, without those of later passes."""
    places = [i for i, layer in enumerate(config.layers) if layer.weights_of is None]
    own = replace(config, layers=tuple(config.layers[i] for i in places))
    specs = [*gqa_param_specs(own, names=_NAMES)]
    for i, layer in enumerate(own.layers):
        specs.extend(_scales(layer, config.hidden_size, f"layers_{i}/", _NAMES.layer.format(i)))
    return tuple(
        replace(
            spec,
            path=re.sub(r"^layers_(\d+)", lambda m: f"layers_{places[int(m[1])]}", spec.path),
            sources=tuple(
                one._replace(name=re.sub(_AS_SAVED, _published, one.name)) for one in spec.sources
            ),
        )
        for spec in specs
    )


def _scales(layer: LayerSpec, width: int, path: str, source: str) -> Iterator[ParamSpec]:
    """The factors of queries, gates and hidden values, and the rates of the stream."""
    assert isinstance(mixer := layer.mixer, AttentionConfig)
    assert isinstance(ffn := layer.ffn, NGPTFeedForwardConfig)
    heads = ArraySpec((mixer.num_heads * mixer.head_dim,), ("heads",))
    for name, tensor in (("query_scale", "sqk"), ("gate_scale", "s_gate")):
        own = (Source(f"{source}self_attn.{tensor}", heads.shape),)
        yield ParamSpec(path + name, heads, own, as_is)
    inner = ffn.width
    array = ArraySpec((2 * inner,), (Fused("ffn", (inner, inner)),))
    own = tuple(Source(f"{source}mlp.suv_{name}", (inner,)) for name in ("gate", "up"))
    yield ParamSpec(f"{path}scales", array, own, join)
    for name, tensor in zip(("mixer", "ffn"), _RATES, strict=True):
        rate = ArraySpec((width,), (None,))
        own = (Source(source + tensor, rate.shape),)
        yield ParamSpec(f"{path}{name}_residual/rate", rate, own, as_is)


def _published(match: re.Match[str]) -> str:
    """The published name of a tensor's layer and block."""
    place, name = {**_BLOCKS, **_RATES}[match[2]]
    return f"{_LAYER}{2 * int(match[1]) + place}.{name}"


FAMILY = ModelFamily(
    name="dory",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    other_names=((_AS_SAVED, _published),),  # as transformers saves them
)
