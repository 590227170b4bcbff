"""AFMoE (Trinity): gates on heads, norms around blocks, windows that alone rotate, experts.

Source: ``modeling_afmoe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, biased_experts, expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _WINDOW, _EVERY, _SHARED = 128, 1024, 4, 2
_TENSORS = ExpertTensors(router="mlp.router.gate", choice_bias="mlp.expert_bias")
_NAMES = TensorNames(gate="self_attn.gate_proj")
_NORMS = NormSources(
    names=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "route_norm", True)
    hf.supported_only(config, "score_func", "sigmoid")
    hf.supported_only(config, "num_expert_groups", 1)
    hf.supported_only(config, "num_limited_groups", 1)
    bias, windows = hf.flag(config, "attention_bias", False), _windows(config)
    scale = {"routed_scaling_factor": hf.positive_float(config, "route_scale", 1.0)}
    own = hf.with_defaults(hf.with_values(config, scale), {"num_shared_experts": _SHARED})
    experts = biased_experts(own, count="num_experts", shared="num_shared_experts")
    factor = None
    if hf.flag(config, "mup_enabled", False):
        factor = hf.positive_int(config, "hidden_size") ** 0.5
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.head_dim(config, _HEAD_DIM),
        windows=windows,
        rotates=[window is not None for window in windows],
        norms="both",
        ffns=networks_by_layer(config, experts, first=1, key="num_dense_layers"),
        attention={"gate": True, "gate_bias": False},
        embed_scale=factor,
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer has none."""
    window = sliding_window(config, _WINDOW)
    every = hf.positive_int(config, "global_attn_every_n_layers", _EVERY)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if (i + 1) % every else None for i in range(num_layers))


FAMILY = ModelFamily(
    name="afmoe",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, norms=_NORMS, names=_NAMES, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
