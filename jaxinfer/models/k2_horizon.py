"""K2 Horizon (MBZUAI IFM): norms of groups, gates on heads, experts, also of values.

Source: vLLM's ``k2_horizon.py``; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    gated_network,
    sparse_layers,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, ExpertsConfig
from jaxinfer.nn.mixers.value_experts_spec import ValueExpertsConfig
from jaxinfer.nn.placement import Fused
from pallas_kernels.route.routing import SCORES, Routing

_GATES = MappingProxyType({"silu": "silu", "softplus": "softplus_2"})
_NAMES = TensorNames(gate="self_attn.gate_proj", in_order=True)
_OF_EXPERTS = (  # keys without an effect where a file has no experts
    *("num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "moe_gate_bias"),
    *("norm_topk_prob", "router_score_func", "router_scaling_factor", "mova_num_experts"),
    *("mova_num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step"),
)
_TENSORS = ExpertTensors(choice_bias="mlp.gate.bias")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "query_key_norm", False)
    hf.supported_only(config, "hidden_act", "silu")
    head_dim = hf.head_dim(config)
    turned, gate = hf.positive_int(config, "rope_head_dim", head_dim), _gate(config)
    bias = hf.flag(config, "attention_bias", False)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    for key in _OF_EXPERTS:
        config.get(key)
    dense = gated_network(config, hf.positive_int(config, "intermediate_size"))
    has_experts = hf.layer_index(config, "num_experts", 0) > 0
    ffns = sparse_layers(config, _experts(config)) if has_experts else [dense] * num_layers
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=head_dim,
        partial_rotary=turned / head_dim,
        ffns=ffns,
        norm="rms_groups",
        norm_groups=_groups(config),
        attention={"gate_bias": False, **({} if gate is None else gate)},
    )
    if not hf.layer_index(config, "mova_num_experts", 0):
        return decoder
    attention = decoder.layers[0].mixer
    assert isinstance(attention, AttentionConfig), "all layers are alike"
    mixer = ValueExpertsConfig(
        attention=attention,
        count=hf.positive_int(config, "mova_num_experts"),
        routing=_routing(config, hf.positive_int(config, "mova_num_experts_per_tok"), None),
        choice_bias=hf.flag(config, "moe_gate_bias", False),
    )
    sparse = [i for i, layer in enumerate(decoder.layers) if layer.ffn.experts is not None]
    return with_mixers(decoder, dict.fromkeys(sparse, mixer))


def _gate(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of attention for the gates of heads; None without gates."""
    name = config.get("attention_gate_func")
    if name is None:
        return None
    hf.supported_only(config, "attention_gate_func", *_GATES)
    return {"gate": True, "gate_act": _GATES[name]}


def _groups(config: Mapping[str, Any]) -> int:
    """The groups of norms; raises ``ConfigError`` if the width cannot be divided into them."""
    count = hf.positive_int(config, "layernorm_num_groups", 1)
    if hf.positive_int(config, "hidden_size") % count:
        raise ConfigError(
            f"config key 'layernorm_num_groups' is {count}, which does not divide 'hidden_size' "
            f"{config['hidden_size']}"
        )
    return count


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """The experts of a layer's network."""
    shared = hf.layer_index(config, "num_shared_experts", 0)
    width = shared * hf.positive_int(config, "moe_intermediate_size")
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=_routing(
            config,
            hf.positive_int(config, "num_experts_per_tok"),
            hf.flag(config, "norm_topk_prob", False),
        ),
        choice_bias=hf.flag(config, "moe_gate_bias", False),
        shared=gated_network(config, width) if width else None,
    )


def _routing(config: Mapping[str, Any], chosen: int, renormalised: bool | None) -> Routing:
    """The choice of experts; weights are ``renormalised``, by default those of several."""
    hf.supported_only(config, "router_score_func", *SCORES[:2])
    return Routing(
        chosen=chosen,
        scores=config.get("router_score_func") or SCORES[0],
        renormalised=chosen > 1 if renormalised is None else renormalised,
        scale=hf.positive_float(config, "router_scaling_factor", 1.0),
    )


def _mixer_specs(
    path: str, source: str, mixer: ValueExpertsConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.value_experts``."""
    del norm_dtype
    c, own, count = mixer.attention, f"{source}self_attn.", mixer.count
    n, k, h = c.num_heads, c.num_kv_heads, c.head_dim
    parts, units = (n * h, n * h, k * h), (n, n, k)
    names = tuple(f"self_attn.{name}_proj" for name in ("gate", "q", "k"))
    if not c.gate:
        parts, units, names = parts[1:], units[1:], names[1:]
    values = (mixer.inner,) * count
    linears = (
        Linear(
            "qk",
            names,
            (width, sum(parts)),
            (None, Fused("heads", parts, units)),
            c.qkv_bias,
            first_bias=not c.gate,
        ),
        Linear(
            "value_experts",
            tuple(f"self_attn.v_experts.{i}" for i in range(count)),
            (width, sum(values)),
            (None, Fused("heads", values, (k,) * count)),
            bias=False,
        ),
        Linear("o", ("self_attn.o_proj",), (n * h, width), ("heads", None), c.o_bias),
    )
    for specs in linear_specs(path, source, linears):
        yield from specs
    router = (Source(f"{own}v_router.weight", (count, width)),)
    yield ParamSpec(f"{path}value_router", ArraySpec((count, width), (None, None)), router, as_is)
    if mixer.choice_bias:
        bias = (Source(f"{own}v_router.bias", (count,)),)
        array = ArraySpec((count,), (None,), jnp.dtype(jnp.float32))
        yield ParamSpec(f"{path}value_choice_bias", array, bias, as_is)


FAMILY = ModelFamily(
    name="k2_horizon",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        names=_NAMES,
        experts=partial(expert_specs, names=_TENSORS),
        mixers=_mixer_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
