"""Gemma 4 (text): heads of two sizes, values with a norm, a factor on the stream after each layer.

Source: ``modeling_gemma4`` of Hugging Face transformers. Layers without a window have larger heads,
of which only the fastest components rotate, and with ``attention_k_eq_v`` make values of their
keys. Scores are not scaled. 26B-A4B has experts beside each dense network; E2B and E4B have inputs
of single layers, and layers that use the keys and values of an earlier one. Parts for images and
audio are not used. 12B is ``gemma4_unified``.
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
from jaxinfer.models.experts import ExpertTensors, expert_activation, expert_specs
from jaxinfer.models.gemma_parts import (
    FULL,
    IGNORED_TENSORS,
    SLIDING,
    input_specs,
    key_layers,
    shared_specs,
)
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
)
from jaxinfer.nn.ffn.beside_spec import DenseAndExpertsConfig
from jaxinfer.nn.layer_spec import LayerEndConfig, LayerInputsConfig
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _GLOBAL_HEAD_DIM, _PATTERN, _WINDOW = 256, 512, 6, 512
_LAYER_INPUT, _LAYER_INPUT_TOKENS = 256, 262_144
_ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
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
_FFN_NORMS = (
    "post_feedforward_layernorm_1.weight",
    "pre_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm_2.weight",
    "router.scale",
)
_TENSORS = ExpertTensors(
    router="router.proj",
    gate="experts.{}.gate_proj",
    up="experts.{}.up_proj",
    down="experts.{}.down_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    mixture, inputs = _mixture(config), _layer_inputs(config)
    return gemma4_config(config, dtype, window=_WINDOW, mixture=mixture, inputs=inputs)


def gemma4_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    window: int,
    mixture: ExpertsConfig | None = None,
    inputs: LayerInputsConfig | None = None,
) -> DecoderSpec:
    """A decoder with this default for windows, experts beside each dense network, and inputs of
    single layers.
    """
    hf.supported_only(config, "use_bidirectional_attention", "vision", False)
    windows = _windows(config, hf.positive_int(config, "sliding_window", window))
    sources = key_layers(config, windows)
    activation = hf.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    global_dim, _ = sizes = _global_sizes(config, windows)
    cap = config.get("final_logit_softcapping")
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=windows,
        rope=_rope(config, FULL, global_dim),
        local_rope=_rope(config, SLIDING, head_dim),
        tied=True,
        scale=1.0,
        norms="both",
        ffns=_networks(config, activation, sources, mixture),
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
        layer_inputs=inputs,
        logit_cap=None if cap is None else hf.positive_float(config, "final_logit_softcapping"),
    )
    keys_too = hf.flag(config, "attention_k_eq_v", False)
    end = LayerEndConfig(None if inputs is None else activation)
    layers: list[LayerSpec] = []
    for layer, source in zip(decoder.layers, sources, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        own = _attention(layer.mixer, sizes, keys_too=keys_too)
        mixer = own if source is None else SharedAttentionConfig(attention=own, of=source)
        layers.append(replace(layer, mixer=mixer, end=end))
    return replace(decoder, layers=tuple(layers))


def _attention(
    mixer: AttentionConfig, global_sizes: tuple[int, int], *, keys_too: bool
) -> AttentionConfig:
    """The attention of a layer, with its own sizes and values."""
    if mixer.window is not None:
        return replace(mixer, values="normalised")
    values, (head_dim, kv_heads) = "keys" if keys_too else "normalised", global_sizes
    return replace(mixer, head_dim=head_dim, num_kv_heads=kv_heads, values=values)


def _networks(
    config: Mapping[str, Any],
    activation: str,
    sources: list[int | None],
    mixture: ExpertsConfig | None,
) -> list[FeedForwardSpec]:
    """The network of each layer; it may be wider in layers without keys of their own."""
    width = hf.positive_int(config, "intermediate_size")
    wider = 2 * width if hf.flag(config, "use_double_wide_mlp", False) else width
    widths = [width if source is None else wider for source in sources]
    dense = [FeedForwardConfig(width=w, activation=activation, gated=True) for w in widths]
    if mixture is None:
        return [*dense]
    return [DenseAndExpertsConfig(dense=one, mixture=mixture) for one in dense]


def _mixture(config: Mapping[str, Any]) -> ExpertsConfig | None:
    """The experts beside each dense network, if there are any."""
    if not hf.flag(config, "enable_moe_block", False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.get(key)
        return None
    count = hf.positive_int(config, "num_experts")
    chosen = hf.positive_int(config, "top_k_experts")
    if chosen > count:
        raise ConfigError(
            f"config key 'top_k_experts' is {chosen}, and there are {count} experts "
            "('num_experts'); correct these numbers in config.json"
        )
    name = hf.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return ExpertsConfig(
        count=count,
        width=hf.positive_int(config, "moe_intermediate_size"),
        routing=Routing(
            chosen, renormalised=True, logit_scale=hf.positive_int(config, "hidden_size") ** -0.5
        ),
        activation=expert_activation(name),
        expert_scale=True,
    )


def _layer_inputs(config: Mapping[str, Any]) -> LayerInputsConfig | None:
    """The inputs of single layers; null or 0 is none."""
    key, vocabulary = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    if config.get(key, _LAYER_INPUT) in (None, 0):
        return None
    tokens = hf.positive_int(config, "vocab_size")
    known = hf.positive_int(config, vocabulary, _LAYER_INPUT_TOKENS)
    if known < tokens:
        raise ConfigError(
            f"config key {vocabulary!r} is {known}, and there are {tokens} tokens ('vocab_size'); "
            "correct these numbers in config.json"
        )
    return LayerInputsConfig(
        width=hf.positive_int(config, key, _LAYER_INPUT),
        num_layers=hf.positive_int(config, "num_hidden_layers"),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        num_tokens=known,
    )


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
    global_heads = hf.positive_int(config, "num_global_key_value_heads", kv_heads)
    if hf.flag(config, "attention_k_eq_v", False):  # transformers ignores the number without it
        kv_heads = global_heads
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
    d, inputs = config.hidden_size, config.layer_inputs
    assert inputs is None or isinstance(inputs, LayerInputsConfig)
    specs = list(gqa_param_specs(config, norms=_NORMS, experts=_beside_specs, mixers=shared_specs))
    for i in range(len(config.layers)):
        specs.extend(_end_specs(f"layers_{i}/", f"model.layers.{i}.", d, inputs))
    if inputs is not None:
        specs.extend(input_specs(inputs, d))
    return tuple(specs)


def _beside_specs(
    path: str, source: str, ffn: DenseAndExpertsConfig, width: int
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.ffn.beside``."""
    weights, _ = linear_specs(f"{path}dense/", source, dense_linears(ffn.dense, width))
    yield from weights
    own = ffn.mixture
    yield from expert_specs(path, source, own, width, _TENSORS)
    scale = (Source(f"{source}router.per_expert_scale", (own.count,)),)
    yield ParamSpec(f"{path}expert_scale", ArraySpec((own.count,), (None,)), scale, as_is)
    norms = tuple(Source(source + name, (width,)) for name in _FFN_NORMS)
    yield ParamSpec(f"{path}ffn_norms", ArraySpec((4, width), (None, None)), norms, stack)


def _end_specs(
    path: str, source: str, width: int, inputs: LayerInputsConfig | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.layer_inputs.LayerEnd``."""
    scale = (Source(f"{source}layer_scalar", (1,)),)
    yield ParamSpec(f"{path}end_scale", ArraySpec((1,), (None,)), scale, as_is)
    if inputs is None:
        return
    axes = (None, None)
    linears = (
        Linear("end_gate", ("per_layer_input_gate",), (width, inputs.width), axes, bias=False),
        Linear(
            "end_projection", ("per_layer_projection",), (inputs.width, width), axes, bias=False
        ),
    )
    weights, _ = linear_specs(path, source, linears)
    yield from weights
    norm = (Source(f"{source}post_per_layer_input_norm.weight", (width,)),)
    yield ParamSpec(f"{path}end_norm", ArraySpec((1, width), axes), norm, stack)


FAMILY = ModelFamily(
    name="gemma4",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=IGNORED_TENSORS,
    optional_prefix="model.language_model.",
    stacked_experts=True,
)
