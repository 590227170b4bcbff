"""Config of ERNIE 4.5, which the text decoder of ERNIE 4.5 VL has, too.

Source: ``modeling_ernie4_5`` and ``modeling_ernie4_5_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.experts import ExpertTensors, experts_config, gated_network
from jaxinfer.models.gqa import gqa_config
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, FeedForwardSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _THETA = 128, 5e5
_CHOSEN, _SHARED = 6, 2
ERNIE_TENSORS = ExpertTensors(
    choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_dims=2
)


def ernie_config(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, windows = hf.flag(config, "use_bias", False), windows_by_layer(config, None)
    is_mixture = "Ernie4_5_MoeForCausalLM" in config.get("architectures", ())
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_dim=hf.head_dim(config, None if is_mixture else _HEAD_DIM),
        windows=windows,
        theta=_THETA,
        ffns=_networks(config, len(windows)) if is_mixture else None,
        head_bias=bias and is_mixture,
        tied=True,
    )


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: dense in the first ones, and where an interval skips layers."""
    hf.supported_only(config, "moe_gate", "topk")
    hf.supported_only(config, "moe_use_aux_free", True)
    config.get("moe_capacity")  # of training
    if config.get("moe_norm_min") != 0 and hf.positive_float(config, "moe_norm_min", 1e-12) > 1e-6:
        raise ConfigError("config key 'moe_norm_min' is above 1e-6, which is not supported")
    bias = hf.flag(config, "use_bias", False)  # experts have none
    each = hf.positive_int(config, "moe_intermediate_size")
    shared = hf.layer_index(config, "moe_num_shared_experts", _SHARED) * each
    experts = experts_config(
        config,
        count="moe_num_experts",
        width="moe_intermediate_size",
        routing=Routing(hf.positive_int(config, "moe_k", _CHOSEN), renormalised=True),
        choice_bias=True,
        shared=gated_network(config, shared, bias=bias) if shared else None,
    )
    dense = dense_network(config, bias=bias)
    interval = hf.positive_int(config, "moe_layer_interval", 1)
    first, last = hf.layer_index(config, "moe_layer_start_index", 1), num_layers - 1
    if config.get("moe_layer_end_index", -1) != -1:
        last = hf.layer_index(config, "moe_layer_end_index", last)
    sparse = (first <= i <= last and (i + 1) % interval == 0 for i in range(num_layers))
    return [experts if one else dense for one in sparse]


def dense_network(config: Mapping[str, Any], *, bias: bool = False) -> FeedForwardConfig:
    """The network of layers without experts."""
    return gated_network(config, hf.positive_int(config, "intermediate_size"), bias=bias)
