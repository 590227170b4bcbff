"""Decoders of layers with the gated delta rule and layers with gated attention, as in Qwen3.5.

Norms but that of the delta rule multiply by 1 + w in float32. An expert that all tokens use is
weighted by a gate. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.delta import LINEAR_KEYS, delta_config
from jaxinfer.models.experts import (
    ExpertTensors,
    experts_config,
    experts_per_token,
    gated_network,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config
from jaxinfer.models.params import plus_one, stack_plus_one
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardSpec,
)
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _ROTATED, _INTERVAL = 256, 0.25, 4

DELTA, FULL = "linear_attention", "full_attention"
NORMS = NormSources(one=plus_one, several=stack_plus_one)
EXPERT_TENSORS = ExpertTensors(shared="mlp.shared_expert.")
HYBRID_IGNORED_TENSORS = (*GQA_IGNORED_TENSORS, r"model\.visual\..*")


def hybrid_config(
    config: Mapping[str, Any], dtype: jnp.dtype, ffns: Sequence[FeedForwardSpec] | None = None
) -> DecoderSpec:
    """A decoder whose layers are of gated attention or of the gated delta rule.

    ``ffns`` are the networks of the layers, by default dense ones. Raises ``ConfigError`` with the
    key.
    """
    hf.supported_only(config, "attn_output_gate", True)
    hf.supported_only(config, "output_gate_type", "swish", "silu")
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    bias, kinds = hf.flag(config, "attention_bias", False), _layer_kinds(config)
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * len(kinds),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        partial_rotary=_ROTATED,
        norm_dtype=jnp.dtype(jnp.float32),
        ffns=ffns,
    )
    for key in LINEAR_KEYS if DELTA not in kinds else ():
        config.get(key)
    delta = delta_config(config) if DELTA in kinds else None
    layers = []
    for layer, kind in zip(decoder.layers, kinds, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        mixer = replace(layer.mixer, gate=True) if kind == FULL else delta
        layers.append(replace(layer, mixer=mixer))
    return replace(decoder, layers=tuple(layers))


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; by default every fourth has attention."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    interval = hf.positive_int(config, "full_attention_interval", _INTERVAL)
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (DELTA, FULL))
    return kinds or [DELTA if (i + 1) % interval else FULL for i in range(num_layers)]


def gated_experts(config: Mapping[str, Any], *, renormalised: bool = True) -> ExpertsConfig:
    """Experts, and one for all tokens that a gate weights."""
    shared = gated_network(config, hf.positive_int(config, "shared_expert_intermediate_size"))
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=Routing(experts_per_token(config), renormalised=renormalised),
        shared=shared,
        shared_gate=True,
    )
