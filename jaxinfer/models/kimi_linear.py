"""Kimi Linear: the delta rule with a decay of each channel, or latent attention without rope.

Source: ``modeling_kimi_linear`` of Hugging Face transformers. Published is 48B-A3B, whose layers
from the second one on have DeepSeek-V3's experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import channel_delta_specs
from jaxinfer.models.experts import (
    ExpertTensors,
    RoutingKeys,
    expert_specs,
    experts_config,
    grouped_routing,
)
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.hybrid import DELTA, FULL
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    dense_network,
    latent_attention,
    latent_decoder,
    latent_param_specs,
    shared_experts,
)
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, LayerSpec, MixerSpec
from jaxinfer.nn.mixers.delta_spec import DeltaConfig

_SECTION = "linear_attn_config"
# the keys of that section, and those of the config itself that transformers writes
_SIZES = MappingProxyType(
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
)
_LISTS = MappingProxyType({"kda_layers": DELTA, "full_attn_layers": FULL})
_DENSE, _SPARSE = "dense", "sparse"
_KEYS = RoutingKeys(
    chosen="num_experts_per_token",
    groups="num_expert_group",
    renormalised="moe_renormalize",
    scores="moe_router_activation_func",
)
_ROUTING = MappingProxyType({"routed_scaling_factor": 2.446})  # transformers' default
_MOE = "block_sparse_moe."
_TENSORS = ExpertTensors(
    router=f"{_MOE}gate",
    gate=_MOE + "experts.{}.w1",
    up=_MOE + "experts.{}.w3",
    down=_MOE + "experts.{}.w2",
    choice_bias=f"{_MOE}gate.e_score_correction_bias",
    shared=f"{_MOE}shared_experts.",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    hf.supported_only(config, "mla_use_nope", True)
    config = hf.with_values(config, {"tie_word_embeddings": False})  # they never are
    for unused in ("head_dim", "rope_theta"):  # published, but nothing rotates
        config.get(unused)
    section = _section(config)
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (DELTA, FULL))
    listed = _listed_kinds(section, num_layers)
    if kinds and kinds != listed and any(section.get(key) is not None for key in _LISTS):
        raise ConfigError(
            f"config key 'layer_types' differs from the lists of {_SECTION!r}; correct one of them"
        )
    mixers: dict[str, MixerSpec] = {
        FULL: latent_attention(config, None, query_rank=None),
        DELTA: _delta(config, section),
    }
    dense, experts = dense_network(config, bias=False), _experts(config)
    sparse = _sparse_layers(config, num_layers)
    layers = (
        LayerSpec(mixers[kind], experts if is_sparse else dense)
        for kind, is_sparse in zip(kinds or listed, sparse, strict=True)
    )
    length = config.get("model_max_length") and hf.positive_int(config, "model_max_length")
    length = length or hf.positive_int(config, "max_position_embeddings")
    return latent_decoder(config, dtype, tuple(layers), (length, length))


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the delta rule; empty if there is none."""
    section = config.get(_SECTION)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"config key {_SECTION!r} must be an object, got {short(section)}")
    for key, value in section.items():
        if value is not None and key not in _SIZES and key not in _LISTS:
            raise ConfigError(
                f"config key {_SECTION!r} has the key {short(key)}, which KimiLinearForCausalLM "
                f"does not know and which may change what it computes; {REMOVE_KEY}"
            )
    return section


def _listed_kinds(section: Mapping[str, Any], num_layers: int) -> list[str]:
    """The kind of each layer by the section's lists, which count from 1.

    Without lists every fourth layer but the first one has attention, as in transformers.
    """
    if all(section.get(key) is None for key in _LISTS):
        return [FULL if i and i % 4 == 0 else DELTA for i in range(num_layers)]
    found: dict[int, str] = {}
    given = [(key, section.get(key) or []) for key in _LISTS]
    fits = all(isinstance(layers, list | tuple) for _, layers in given)
    if fits and sum(len(layers) for _, layers in given) == num_layers:
        found = {i: _LISTS[key] for key, layers in given for i in layers if type(i) is int}
    if found.keys() != {*range(1, num_layers + 1)}:
        raise ConfigError(
            f"config key {_SECTION!r} must have each of the {num_layers} layers, counted from 1, "
            f"in one of its lists {' and '.join(map(repr, _LISTS))}"
        )
    return [found[i] for i in range(1, num_layers + 1)]


def _delta(config: Mapping[str, Any], section: Mapping[str, Any]) -> DeltaConfig:
    """The mixer with the delta rule; transformers' keys count where the section has none."""
    sizes = {}
    for key, other in _SIZES.items():
        if section.get(key) is not None:
            hf.supported_only(config, other, section[key])
        value = config.get(other) if section.get(key) is None else section[key]
        sizes[key] = hf.positive_int({f"{_SECTION}.{key}": value}, f"{_SECTION}.{key}")
    heads, width = sizes["num_heads"], sizes["head_dim"]
    return DeltaConfig(
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=width,
        v_dim=width,
        conv_width=sizes["short_conv_kernel_size"],
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        decay="channel",
        gate_act="sigmoid",
        gate_rank=width,
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    hf.supported_only(config, _KEYS.scores, "sigmoid")
    hf.supported_only(config, "use_grouped_topk", True)
    hf.supported_only(config, "topk_method", "noaux_tc")
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(hf.with_defaults(config, _ROUTING), "sigmoid", _KEYS),
        keys=_KEYS,
        choice_bias=True,
        shared=shared_experts(config, key="num_shared_experts"),
    )


def _sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """True for each layer with experts."""
    hf.supported_only(config, "moe_layer_freq", 1)
    first = hf.layer_index(config, "first_k_dense_replace", 1)
    kinds = hf.layer_kinds(config, "mlp_layer_types", num_layers, (_DENSE, _SPARSE))
    if kinds is None:
        return [i >= first for i in range(num_layers)]
    return [kind == _SPARSE for kind in kinds]  # as transformers, which saves the other key, too


FAMILY = ModelFamily(
    name="kimi_linear",
    config_from_hf=config_from_hf,
    param_specs=partial(
        latent_param_specs,
        experts=partial(expert_specs, names=_TENSORS),
        mixers=channel_delta_specs,
    ),
    ignored_tensors=LATENT_IGNORED_TENSORS,
    # of dense layers, as transformers saves them
    other_names=((rf"{re.escape(_MOE)}(gate|up|down)_proj", r"mlp.\1_proj"),),
)
