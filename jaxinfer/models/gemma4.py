"""Gemma 4 (text): heads of two sizes, values with a norm, a factor on the stream after each layer.

Source: ``modeling_gemma4`` of Hugging Face transformers. Layers without a window have larger heads,
of which only the fastest components rotate, and with ``attention_k_eq_v`` make values of their
keys. Scores are not scaled. Published are 31B, with parts for images that are not used, and, as
``gemma4_unified``, 12B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    windows_by_layer,
)
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.params import ArraySpec, ParamSpec, Source, as_is
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, LayerSpec
from jaxinfer.nn.layer_spec import LayerEndConfig
from jaxinfer.nn.rope import RopeConfig

# transformers' defaults
_HEAD_DIM, _GLOBAL_HEAD_DIM, _PATTERN, _WINDOW = 256, 512, 6, 512
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
)
_SIZES = ("head_dim", "num_key_value_heads")  # that may differ from layer to layer

_NORMS = NormSources(
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)
IGNORED_TENSORS = (
    *GQA_IGNORED_TENSORS,
    r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\..*",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gemma4_config(config, dtype, window=_WINDOW)


def gemma4_config(config: Mapping[str, Any], dtype: jnp.dtype, *, window: int) -> DecoderSpec:
    """The same with another default for the window."""
    hf.supported_only(config, "use_bidirectional_attention", "vision", False)
    hf.supported_only(config, "num_kv_shared_layers", 0)
    hf.supported_only(config, "enable_moe_block", False)
    hf.supported_only(config, "use_double_wide_mlp", False)
    hf.supported_only(config, "hidden_size_per_layer_input", 0)
    windows = _windows(config, hf.positive_int(config, "sliding_window", window))
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    global_dim, global_kv = _global_sizes(config, windows)
    cap = config.get("final_logit_softcapping")
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=windows,
        rope=_rope(config, _FULL, global_dim),
        local_rope=_rope(config, _SLIDING, head_dim),
        activation=hf.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        scale=1.0,
        norms="both",
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
        logit_cap=None if cap is None else hf.positive_float(config, "final_logit_softcapping"),
    )
    keys_too = hf.flag(config, "attention_k_eq_v", False)
    layers: list[LayerSpec] = []
    for layer in decoder.layers:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        mixer = replace(mixer, values="normalised")
        if mixer.window is None:
            values = "keys" if keys_too else "normalised"
            mixer = replace(mixer, head_dim=global_dim, num_kv_heads=global_kv, values=values)
        layers.append(replace(layer, mixer=mixer, end=LayerEndConfig()))
    return replace(decoder, layers=tuple(layers))


def _windows(config: Mapping[str, Any], window: int) -> tuple[int | None, ...]:
    """The window of each layer; by default every sixth has none, and the last one never has."""
    if config.get("layer_types") is not None:
        windows = windows_by_layer(config, window)
    else:
        num_layers = hf.positive_int(config, "num_hidden_layers")
        windows = tuple(window if (i + 1) % _PATTERN else None for i in range(num_layers))
    return (*windows[:-1], None)


def _global_sizes(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[int, int]:
    """The head_dim and the number of kv heads of layers without a window.

    They are under keys of their own, or, as transformers saves them, under "per_layer_config".
    """
    kv_heads = hf.positive_int(
        config, "num_key_value_heads", hf.positive_int(config, "num_attention_heads")
    )
    if hf.flag(config, "attention_k_eq_v", False):
        kv_heads = hf.positive_int(config, "num_global_key_value_heads", kv_heads)
    head_dim = hf.positive_int(config, "global_head_dim", _GLOBAL_HEAD_DIM)
    own = _per_layer_sizes(config, windows)
    if own is not None:
        head_dim = hf.positive_int(own, "head_dim", hf.positive_int(config, "head_dim", _HEAD_DIM))
        default = hf.positive_int(config, "num_key_value_heads", kv_heads)
        kv_heads = hf.positive_int(own, "num_key_value_heads", default)
    num_heads = hf.positive_int(config, "num_attention_heads")
    if num_heads % kv_heads:
        raise ConfigError(
            f"config key 'num_attention_heads' {num_heads} is not a multiple of the {kv_heads} kv "
            "heads of layers without a window ('num_global_key_value_heads')"
        )
    return head_dim, kv_heads


def _per_layer_sizes(
    config: Mapping[str, Any], windows: tuple[int | None, ...]
) -> Mapping[str, Any] | None:
    """The sizes of each layer without a window under "per_layer_config"; None without the key."""
    given = config.get("per_layer_config")
    if given is None:
        return None
    full = {str(i) for i, window in enumerate(windows) if window is None}
    sizes = list(given.values()) if isinstance(given, Mapping) else []
    alike = all(isinstance(one, Mapping) and one == sizes[0] for one in sizes)
    if given == {}:
        return {}
    if not sizes or not alike or set(map(str, given)) != full or {*sizes[0]} - {*_SIZES}:
        raise ConfigError(
            f"config key 'per_layer_config' is {short(given)}, which is not supported here; layers "
            f"may differ in {' and '.join(map(repr, _SIZES))}, of all layers without a window alike"
        )
    return sizes[0]  # type: ignore[no-any-return]


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeConfig:
    """The rope of layers of a kind, which has a section of its own."""
    place = "rope_parameters"
    sections = config.get(place)
    if sections is None:
        sections = _ROPES
    known = isinstance(sections, Mapping) and sections.keys() <= _ROPES.keys()
    if not known or not isinstance(sections.get(kind), Mapping):
        raise ConfigError(
            f"config key {place!r} is {short(sections)}, and Gemma 4 needs a section for each of "
            f"{' and '.join(map(repr, _ROPES))}; correct it"
        )
    positions = "max_position_embeddings"
    own = {place: sections[kind], positions: config.get(positions)}
    return rope_config(own, head_dim, theta=_ROPES[kind]["rope_theta"])


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``, with Hugging Face's names of their sources."""
    specs = list(gqa_param_specs(config, norms=_NORMS))
    for i in range(len(config.layers)):
        specs.extend(_end_specs(f"layers_{i}/", f"model.layers.{i}."))
    return tuple(specs)


def _end_specs(path: str, source: str) -> Iterator[ParamSpec]:
    """The parameters of the end of a layer."""
    scale = Source(f"{source}layer_scalar", (1,))
    yield ParamSpec(f"{path}end_scale", ArraySpec((1,), (None,)), (scale,), as_is)


FAMILY = ModelFamily(
    name="gemma4",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=IGNORED_TENSORS,
    optional_prefix="model.language_model.",
)
