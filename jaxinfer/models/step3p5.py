"""Step 3.5, and the text of Step 3.7: more heads in layers with windows, bounded SwiGLU, experts.

Source: ``modeling_step3p7`` of Hugging Face transformers; keys are also those of published files,
whose lists may go on for prediction layers. A layer's experts are in three tensors. Tensors for
images are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, gated_network, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ROPE_KEYS, SECTIONS, ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import plus_one, stack_plus_one
from jaxinfer.models.step_parts import sparse_layers, stacked_expert_specs
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    FeedForwardSpec,
)
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.experts.stack import Activation
from pallas_kernels.route.routing import Routing

_FULL, _SLIDING, _FIRST, _SHARED_WIDTH = "full_attention", "sliding_attention", 3, 1280
_NORMS = NormSources(one=plus_one, several=stack_plus_one)
_NAMES = TensorNames(gate="self_attn.g_proj")
# the keys of published files for those of transformers
_PUBLISHED = (
    ("num_key_value_heads", "num_attention_groups"),
    ("n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_top_k"),
    ("share_expert_dim", "share_expert_dims"),
)
# keys of published files, and the only values in use
_FIXED: tuple[tuple[str, Any], ...] = (
    *(("use_head_wise_attn_gate", True), ("zero_centered", True), ("sink", False)),
    *(("use_moe", True), ("norm_expert_weight", True), ("use_moe_router_bias", True)),
    *(("moe_router_activation", "sigmoid"), ("att_impl_type", "GQA"), ("use_mfa", False)),
    *(("yarn_only_types", [_FULL]), ("use_bidirectional_attention", False), ("mlp_bias", False)),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    given = {ours: config.get(theirs) for ours, theirs in _PUBLISHED if config.get(ours) is None}
    config = hf.with_values(config, {key: value for key, value in given.items() if value})
    for key, only in _FIXED:
        hf.supported_only(config, key, only)
    hf.supported_only(config, "use_rope_layers", [], [])
    for unused in ("hidden_act", "use_qk_norm", "need_fp32_gate", "moe_layer_offset"):
        config.get(unused)  # as in transformers
    for unused in ("mtp_layer_types", "mtp_mlp_layer_types", "moe_every_n_layer"):
        config.get(unused)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    lists = {key: _of_layers(config, key, num_layers) for key in ("layer_types", "mlp_layer_types")}
    config = hf.with_values(config, lists)
    windows = windows_by_layer(
        config, sliding_window(config, None) if lists["layer_types"] else None
    )
    head_dim = hf.positive_int(config, "head_dim")
    rope, local = _ropes(config, windows, head_dim)
    bias = hf.flag(config, "attention_bias", False)
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        scale=hf.positive_float(config, "query_pre_attn_scalar", head_dim) ** -0.5,
        windows=windows,
        rope=rope,
        local_rope=local,
        ffns=_networks(config, num_layers),
        attention={"head_gate": True},
    )
    heads, layers = _sliding_heads(config, windows), []
    for layer in decoder.layers:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        own = mixer.num_heads if mixer.window is None else heads
        layers.append(replace(layer, mixer=replace(mixer, num_heads=own)))
    return replace(decoder, layers=tuple(layers))


def _of_layers(config: Mapping[str, Any], key: str, num_layers: int) -> list[Any] | None:
    """A list without what it has for prediction layers; None if the key is absent or no list."""
    given = config.get(key)
    if not isinstance(given, list | tuple):
        return None
    if len(given) < num_layers:
        raise ConfigError(
            f"config key {key!r} must hold a value for each of the {num_layers} layers, got "
            f"{short(given)}"
        )
    return list(given[:num_layers])


def _sliding_heads(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> int:
    """The query heads of layers with a window, under any of three keys."""
    common, kv_heads = hf.head_counts(config)
    other = config.get("attention_other_setting")
    other = other if isinstance(other, Mapping) else {}
    for key, value in (
        ("attention_type", _SLIDING),
        ("num_attention_groups", kv_heads),
        *((key, hf.positive_int(config, "head_dim")) for key in ("head_dim", "true_head_dim")),
    ):
        hf.supported_only(other, key, value)
    heads = hf.positive_int(other, "num_attention_heads", common)
    heads = hf.positive_int(config, "num_sliding_attention_heads", heads)
    own = {"num_attention_heads": heads}
    each = {str(i): own for i, window in enumerate(windows) if window is not None}
    hf.supported_only(config, "per_layer_config", each, *([{}] if heads == common else []))
    if heads % kv_heads:
        raise ConfigError(
            f"config key 'num_sliding_attention_heads' {heads} is not a multiple of "
            f"'num_key_value_heads' {kv_heads}"
        )
    return heads


def _ropes(
    config: Mapping[str, Any], windows: tuple[int | None, ...], head_dim: int
) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers without and with a window; published files have lists of the layers'
    bases and rotating parts, of which a kind's first layer counts, and one scaling.
    """
    sections = config.get("rope_parameters")
    if isinstance(sections, Mapping) and any(isinstance(s, Mapping) for s in sections.values()):
        return ropes_by_kind(config, head_dim, theta=10000.0, partials=(1.0, 1.0))
    kinds = [_FULL if window is None else _SLIDING for window in windows]
    made: dict[str, dict[str, Any]] = {_FULL: {}, _SLIDING: {}}
    for key, listed in (
        ("rope_theta", "rope_theta"),
        ("partial_rotary_factor", "partial_rotary_factors"),
    ):
        own = _of_layers(config, listed, len(windows))
        for kind in {*kinds}:
            if own is not None:
                values = {own[i] for i, one in enumerate(kinds) if one == kind}
                if len(values) > 1:
                    raise ConfigError(
                        f"config key {listed!r} has {short(sorted(values))} for layers of {kind}, "
                        "which rotate alike; make them equal"
                    )
                made[kind][key] = values.pop()
            elif listed == key and config.get(key) is not None:
                made[kind][key] = hf.positive_float(config, key)
    if config.get("local_rope_theta") is not None:  # of GGUF files
        made[_SLIDING]["rope_theta"] = hf.positive_float(config, "local_rope_theta")
    for place in SECTIONS:
        if isinstance(config.get(place), Mapping):
            made[_FULL] |= config[place]
    own_keys = {**dict.fromkeys(ROPE_KEYS), "rope_parameters": made}
    own_keys["max_position_embeddings"] = config.get("max_position_embeddings")
    return ropes_by_kind(own_keys, head_dim, theta=10000.0, partials=(1.0, 1.0))


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer, with its bounds; 0 and null are none."""
    width = hf.positive_int(config, "share_expert_dim", _SHARED_WIDTH)
    routing = Routing(
        chosen=hf.positive_int(config, "num_experts_per_tok"),
        scores="sigmoid",
        renormalised=True,
        scale=hf.positive_float(config, "moe_router_scaling_factor", 1.0),
    )
    own = hf.with_values(config, {"hidden_act": "silu"})
    experts = experts_config(
        own,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=routing,
        choice_bias=True,
        shared=gated_network(own, width),
    )
    if config.get("mlp_layer_types") is None:
        sparse = sparse_layers(config.get("moe_layers_enum"), num_layers, _FIRST)
        kinds = ["sparse" if i in sparse else "dense" for i in range(num_layers)]
        own = hf.with_values(own, {"mlp_layer_types": kinds})
    else:
        config.get("moe_layers_enum")
    networks = networks_by_layer(own, experts, first=0)
    limits, shared = (
        _of_layers(config, key, num_layers) or [None] * num_layers
        for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    return [_bounded(*each) for each in zip(networks, limits, shared, strict=True)]


def _bounded(network: FeedForwardSpec, limit: Any, shared: Any) -> FeedForwardSpec:
    """The network with the bound of its experts, and that of all tokens' network."""
    limit, shared = (
        hf.positive_float({key: value}, key) if value else None
        for key, value in (("swiglu_limits", limit), ("swiglu_limits_shared", shared))
    )
    if isinstance(network, FeedForwardConfig):
        return replace(network, limit=shared)
    assert isinstance(network, ExpertsConfig) and network.shared is not None
    activation = Activation() if limit is None else _bounded_swiglu(limit)
    return replace(network, activation=activation, shared=replace(network.shared, limit=shared))


def _bounded_swiglu(limit: float) -> Activation:
    """SwiGLU of which both factors are bounded, the gate's after its SiLU.

    SiLU grows from -1.28 on and is negative before 0, so that the bound is one of the gate itself:
    the c with SiLU(c) = limit.
    """
    of_gate = limit
    for _ in range(100):  # c = limit / sigmoid(c), which converges
        of_gate = limit * (1 + math.exp(-of_gate))
    return Activation(limit=limit, gate_limit=of_gate)


FAMILY = ModelFamily(
    name="step3p5",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES, experts=stacked_expert_specs),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"vision_model\..*", r"vit_large_projector\..*"),
)
