"""Cohere 2's mixtures of experts: parallel blocks, windows that alone rotate, experts.

Source: ``modeling_cohere2_moe`` of Hugging Face transformers. A softmax of the chosen logits is one
of all logits, renormalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    expert_specs,
    experts_config,
    experts_per_token,
    gated_network,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import section_theta
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from pallas_kernels.route.routing import SCORES, Routing

# transformers' defaults
_HEAD_DIM, _SCALE, _PATTERN = 128, 0.0625, 4
_DENSE_WIDTH = "prefix_dense_intermediate_size"
_NORMS = NormSources(names=("input_layernorm",))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config = section_theta(config)
    bias, windows = hf.flag(config, "attention_bias", False), _windows(config)
    experts = _experts(config)
    ffns = networks_by_layer(config, experts, first=0, width=_DENSE_WIDTH)
    always = hf.positive_int(config, "prefix_dense_sliding_window_pattern", 1) == 1
    rotates = [
        window is not None or (always and ffn is not experts)
        for window, ffn in zip(windows, ffns, strict=True)
    ]
    is_rms = config.get("rms_norm_eps") is not None
    config.get("layer_norm_eps")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=windows,
        rotates=rotates,
        norms="shared",
        norm="rms" if is_rms else "layer_weight",
        parallel=True,
        tied=True,
        ffns=ffns,
        logit_scale=hf.positive_float(config, "logit_scale", _SCALE),
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """The experts; their sum and the network of all tokens are added, or averaged."""
    scores, shared = config.get("expert_selection_fn") or "softmax", None
    if scores not in SCORES:
        raise ConfigError(
            f"config key 'expert_selection_fn' is {short(scores)}; known functions are "
            f"{', '.join(SCORES)}"
        )
    renormalised = hf.flag(config, "norm_topk_prob", True) or scores == "softmax"
    strategy = "shared_expert_combination_strategy"
    hf.supported_only(config, strategy, "average", "sum")
    number, factor = hf.layer_index(config, "num_shared_experts", 0), 1.0
    if number:
        width = number * hf.positive_int(config, "intermediate_size")
        shared = gated_network(config, width)
        factor = 1.0 if config.get(strategy) == "sum" else 0.5
    return experts_config(
        config,
        count="num_experts",
        width="intermediate_size",
        routing=Routing(experts_per_token(config), scores, renormalised, factor),
        shared=shared,
        shared_scale=factor,
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer after the dense ones has none."""
    window, num_layers = sliding_window(config), hf.positive_int(config, "num_hidden_layers")
    pattern = hf.positive_int(config, "sliding_window_pattern", _PATTERN)
    dense = hf.layer_index(config, "first_k_dense_replace", 0)
    own = hf.positive_int(config, "prefix_dense_sliding_window_pattern", 1)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    numbers = [(i + 1, own) if i < dense else (i - dense + 1, pattern) for i in range(num_layers)]
    return tuple(window if number % every else None for number, every in numbers)


FAMILY = ModelFamily(
    name="cohere2_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, interleaved=True, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
