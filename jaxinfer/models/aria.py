"""Aria's text decoder: Llama with experts, and a network that every token uses as well.

Source: ``modeling_aria`` of Hugging Face transformers. Experts are chosen by logits, of which a
softmax of the chosen ones gives the weights. Their tensors hold those of all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_axes,
    experts_config,
    gated_network,
    router_specs,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.linears import dense_linears, linear_specs
from jaxinfer.models.params import ParamSpec, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from pallas_kernels.experts.stack import SWIGLU
from pallas_kernels.route.routing import Routing

_COUNT, _CHOSEN, _SHARED = 8, 2, 2  # transformers' defaults
_TENSORS = ExpertTensors(router="mlp.router")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_bias", False)  # of the network of all tokens
    bias, windows = hf.flag(config, "attention_bias", False), windows_by_layer(config, None)
    width = hf.positive_int(config, "intermediate_size")
    shared = hf.layer_index(config, "moe_num_shared_experts", _SHARED) * width
    experts = experts_config(
        hf.with_defaults(config, {"moe_num_experts": _COUNT}),
        count="moe_num_experts",
        width="intermediate_size",
        routing=Routing(hf.positive_int(config, "moe_topk", _CHOSEN), renormalised=True),
        activation=SWIGLU,
        shared=gated_network(config, shared) if shared else None,
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        windows=windows,
        ffns=[experts] * len(windows),
    )


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor for all gates and ups, one for all downs."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    axes, e = expert_axes(ffn), ffn.count
    for name, tensor, outputs, inputs, own_axes in (
        ("gate_up", "fc1", 2 * ffn.width, width, axes.gate_up),
        ("down", "fc2", width, ffn.width, axes.down),
    ):
        stored = f"{source}mlp.experts.{tensor}.weight"
        parts = tuple(Source(stored, (e, inputs, outputs), part=i) for i in range(e))
        array = ArraySpec((e, outputs, inputs), own_axes)
        yield ParamSpec(path + name, array, parts, transposed, pieces=e, matrix="experts_in_out")
    if ffn.shared is not None:
        linears = dense_linears(ffn.shared, width, _TENSORS.shared)
        yield from linear_specs(f"{path}shared/", source, linears)[0]


FAMILY = ModelFamily(
    name="aria",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
