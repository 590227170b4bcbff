"""MiMo-V2-Flash: windows with sinks and more KV heads in most layers, values narrower than keys.

Source: ``modeling_mimo_v2_flash`` of Hugging Face transformers. Published files have names of their
own for some keys.
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
from jaxinfer.models.experts import biased_experts, expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec

# transformers' defaults
_HEAD_DIM, _VALUE_DIM, _WINDOW, _VALUE_SCALE, _EPS = 192, 128, 129, 0.707, 1e-5
_THETA, _LOCAL_THETA, _ROTATED, _EVERY = 5e6, 1e4, 0.334, 6
_FULL, _SLIDING, _DENSE, _SPARSE = "full_attention", "sliding_attention", "dense", "sparse"
_NAMES = TensorNames(sinks="self_attn.attention_sink_bias")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    heads = hf.positive_int(config, "num_attention_heads")
    kv_heads = hf.positive_int(config, "num_key_value_heads", heads)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    value_dim = hf.positive_int(config, "v_head_dim", _VALUE_DIM)
    if value_dim > head_dim:
        raise ConfigError(
            f"config key 'v_head_dim' is {value_dim}, and values that are wider than keys "
            f"('head_dim', {head_dim}) are not supported"
        )
    _check_published(config, heads, head_dim, value_dim)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    default = [_SLIDING if i and (i + 1) % _EVERY else _FULL for i in range(num_layers)]
    kinds = _by_layer(config, "layer_types", "hybrid_layer_pattern", (_FULL, _SLIDING), default)
    default = [_SPARSE if i else _DENSE for i in range(num_layers)]
    ffns = _by_layer(config, "mlp_layer_types", "moe_layer_freq", (_DENSE, _SPARSE), default)
    given = {"mlp_layer_types": ffns, "moe_layer_freq": None}
    rope, local = ropes_by_kind(
        config,
        head_dim,
        theta=_THETA,
        local_theta=_LOCAL_THETA,
        local_key="swa_rope_theta",
        partials=(_part(config, _FULL), _part(config, _SLIDING)),
    )
    scale = config.get("attention_value_scale", _VALUE_SCALE)
    scale = 1.0 if scale is None else hf.positive_float(config, "attention_value_scale", scale)
    own = hf.with_defaults(config, {"routed_scaling_factor": 1.0, "norm_topk_prob": True})
    experts = biased_experts(hf.with_values(own, {"moe_layer_freq": 1}), shared=None)
    window = _window(config)
    eps_key = hf.first_of(config, "rms_norm_eps", "layernorm_epsilon")
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        head_dim=head_dim,
        windows=tuple(window if kind == _SLIDING else None for kind in kinds),
        rope=rope,
        local_rope=local,
        norm_eps=hf.positive_float(config, eps_key, _EPS),
        ffns=networks_by_layer(hf.with_values(config, given), experts, first=1),
        attention={"own_value_dim": value_dim, "value_scale": scale},
    )
    local_heads = hf.positive_int(config, "swa_num_key_value_heads", 2 * kv_heads)
    layers = []
    for layer in decoder.layers:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        if mixer.window is not None:
            mixer = replace(mixer, num_kv_heads=local_heads, sinks=True)
        if heads % mixer.num_kv_heads:
            raise ConfigError(
                f"config key 'num_attention_heads' {heads} is not a multiple of "
                f"{mixer.num_kv_heads}, the KV heads of layers with windows"
            )
        layers.append(replace(layer, mixer=mixer))
    return replace(decoder, layers=tuple(layers))


def _check_published(config: Mapping[str, Any], heads: int, head_dim: int, value_dim: int) -> None:
    """Raise ``ConfigError`` for published keys with values that no published file has."""
    hf.supported_only(config, "swa_num_attention_heads", heads)
    hf.supported_only(config, "swa_head_dim", head_dim)
    hf.supported_only(config, "swa_v_head_dim", value_dim)
    hf.supported_only(config, "add_swa_attention_sink_bias", True)
    hf.supported_only(config, "add_full_attention_sink_bias", False)
    hf.supported_only(config, "n_shared_experts", 0)
    config.get("attention_chunk_size")  # which the published code does not use


def _part(config: Mapping[str, Any], kind: str) -> float:
    """The default part of a head that rotates, which in transformers scaled ropes do not have."""
    if config.get("partial_rotary_factor") is not None:
        return hf.positive_float(config, "partial_rotary_factor")
    given = config.get("rope_parameters")
    own = given.get(kind, given) if isinstance(given, Mapping) else {}
    scales = isinstance(own, Mapping) and own.get("rope_type", "default") != "default"
    return 1.0 if scales else _ROTATED


def _window(config: Mapping[str, Any]) -> int:
    """The window with the token itself, which the published key leaves out."""
    if config.get("sliding_window_size") is not None:
        config.get("sliding_window")
        return hf.positive_int(config, "sliding_window_size") + 1
    return hf.positive_int(config, "sliding_window", _WINDOW)


def _by_layer(
    config: Mapping[str, Any],
    key: str,
    published: str,
    kinds: tuple[str, str],
    default: list[str],
) -> list[str]:
    """The kind of each layer: by transformers' key, or by 0 and 1 in the published one."""
    found, given = hf.layer_kinds(config, key, len(default), kinds), config.get(published)
    if found is not None or given is None:
        return found or default
    fits = isinstance(given, list | tuple) and len(given) == len(default)
    if not fits or not all(type(one) is int and one in (0, 1) for one in given):
        raise ConfigError(
            f"config key {published!r} must hold 0 or 1 for each of the {len(default)} layers, got "
            f"{short(given)}"
        )
    return [kinds[one] for one in given]


FAMILY = ModelFamily(
    name="mimo_v2_flash",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES, experts=expert_specs),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.mtp\..*"),
)
