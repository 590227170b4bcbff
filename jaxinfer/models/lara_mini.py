"""Lara 4 Mini: the gated delta rule, attention with windows that alone rotates, and in few layers
attention without them; experts beside one of all tokens.

Source: ``modeling_lara_mini`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import LINEAR_KEYS, delta_config, fused_delta_specs
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    experts_per_token,
    gated_network,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

_DELTA, _WINDOWED, _FULL = "linear_attention", "sliding_attention", "full_attention"
# transformers' defaults
_PATTERN = (_DELTA, _WINDOWED, _DELTA, _FULL, _WINDOWED)
_HEAD_DIM, _WINDOW = 128, 512
_TENSORS = ExpertTensors(shared="mlp.shared_expert.")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, _PATTERN[:2] + (_FULL,))
    kinds = kinds or [_PATTERN[i % len(_PATTERN)] for i in range(num_layers)]
    window = hf.positive_int(config, "sliding_window", _WINDOW)
    bias = hf.flag(config, "attention_bias", False)
    experts = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=Routing(
            experts_per_token(config), renormalised=hf.flag(config, "norm_topk_prob", True)
        ),
        shared=gated_network(config, hf.positive_int(config, "shared_expert_intermediate_size")),
    )
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=[window if kind == _WINDOWED else None for kind in kinds],
        rotates=[kind == _WINDOWED for kind in kinds],
        tied=True,
        ffns=[experts] * num_layers,
    )
    for key in LINEAR_KEYS if _DELTA not in kinds else ():
        config.get(key)
    layers = [i for i, kind in enumerate(kinds) if kind == _DELTA]
    return with_mixers(decoder, dict.fromkeys(layers, delta_config(config)) if layers else {})


FAMILY = ModelFamily(
    name="lara_mini",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        experts=partial(expert_specs, names=_TENSORS),
        mixers=fused_delta_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
    stacked_experts=True,
)
