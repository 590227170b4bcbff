"""Flint: windows, whose layers alone rotate, sinks in all, sigmoid experts beside a shared one.

Source: ``modeling_flint`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    experts_per_token,
    gated_network,
    sparse_layers,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _WINDOW, _SHARED_WIDTH = 128, 513, 1024
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TENSORS = ExpertTensors(shared="mlp.shared_expert.")
_NAMES = TensorNames(sinks="self_attn.softmax_offset")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    ends = {0, num_layers - 1}
    kinds = [_FULL if i in ends or i % 4 == 1 else _SLIDING for i in range(num_layers)]
    config = hf.with_defaults(config, {"mlp_only_layers": [0, 1], "layer_types": kinds})
    windows = windows_by_layer(config, sliding_window(config, _WINDOW))
    routing = Routing(
        experts_per_token(config),
        scores="sigmoid",
        renormalised=hf.flag(config, "norm_topk_prob", True),
    )
    width = hf.positive_int(config, "shared_expert_intermediate_size", _SHARED_WIDTH)
    experts = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=routing,
        shared=gated_network(config, width),
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=windows,
        rotates=[window is not None for window in windows],
        sinks=True,
        ffns=sparse_layers(config, experts),
    )


FAMILY = ModelFamily(
    name="flint",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, names=_NAMES, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
