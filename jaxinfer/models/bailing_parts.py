"""Config keys and names of tensors that Ling's and Ring's models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.models import hf_config as hf
from jaxinfer.models.experts import (
    ExpertTensors,
    RoutingKeys,
    experts_config,
    experts_per_token,
    gated_network,
    grouped_routing,
)
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import ExpertsConfig
from pallas_kernels.route.routing import Routing

NAMES = TensorNames(
    embed="model.word_embeddings",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    qk_norms=("attention.query_layernorm", "attention.key_layernorm"),
)
TENSORS = ExpertTensors(choice_bias="mlp.gate.expert_bias")
_KEYS = RoutingKeys(scores="score_function")
_GROUPS = MappingProxyType({"n_group": 8, "topk_group": 4})  # the published code's defaults
# Keys of training; of windows that are switched off; the router's dtype, which is float32 here.
_UNUSED = (
    *("embedding_dropout", "output_dropout", "mtp_loss_scaling_factor", "router_dtype"),
    *("sliding_window", "max_window_layers", "multi_gate"),
)


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for what no published file has: biases of networks, a normalised head,
    windows.
    """
    for key in ("use_bias", "norm_head", "norm_softmax", "use_sliding_window"):
        hf.supported_only(config, key, False)
    hf.supported_only(config, "use_rmsnorm", True)
    for key in _UNUSED:
        config.get(key)


def with_rotated_part(config: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """The config with ``partial_rotary_factor`` for "rotary_dim", if it has that."""
    if config.get("rotary_dim") is None:
        return config
    config.get("partial_rotary_factor")  # of which it is the other name
    part = hf.positive_int(config, "rotary_dim") / head_dim
    return hf.with_values(config, {"partial_rotary_factor": part})


def plain_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """The experts of the first models: chosen by a softmax."""
    renormalised = hf.flag(config, "norm_topk_prob", True)
    return _experts(config, Routing(experts_per_token(config), renormalised=renormalised))


def biased_sigmoid_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """The experts from Ling 2.0 on: chosen as in DeepSeek-V3."""
    hf.supported_only(config, "norm_topk_prob", True)
    hf.supported_only(config, "score_function", "sigmoid")
    hf.positive_float(config, "routed_scaling_factor")
    biased = hf.flag(config, "moe_router_enable_expert_bias", True)
    own = hf.with_values(hf.with_defaults(config, _GROUPS), {"norm_topk_prob": True})
    return _experts(config, grouped_routing(own, "sigmoid", _KEYS), choice_bias=biased)


def _experts(config: Mapping[str, Any], routing: Routing, **more: Any) -> ExpertsConfig:
    number, shared = hf.layer_index(config, "num_shared_experts", 0), None
    width = hf.positive_int(config, "moe_intermediate_size")
    width = hf.positive_int(config, "moe_shared_expert_intermediate_size", width) * number
    if width:
        shared = gated_network(config, width)
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=routing,
        shared=shared,
        **more,
    )
