"""Kolibri 1: windows, whose layers alone rotate, norms before and after blocks, and experts that
are chosen by biased logits and weighted by sigmoids, beside one of all tokens.

Source: ``modeling_kolibri1`` of Hugging Face transformers.
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
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _WINDOW, _SHARED_WIDTH, _PERIOD = 128, 513, 512, 5
_NORMS = NormSources(
    ("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm")
)
_TENSORS = ExpertTensors(choice_bias="moe.router.expert_bias")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    window = hf.positive_int(config, "sliding_window", _WINDOW)
    windows = windows_by_layer(config, window)
    if config.get("layer_types") is None:
        windows = tuple(window if (i + 1) % _PERIOD else None for i in range(num_layers))
    routing = Routing(
        experts_per_token(config),
        scores="sigmoid",
        renormalised=hf.flag(config, "norm_topk_prob", False),
        by_logits=True,
    )
    width = hf.positive_int(config, "shared_expert_intermediate_size", _SHARED_WIDTH)
    experts = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=routing,
        choice_bias=True,
        shared=gated_network(config, width),
    )
    return gqa_config(
        config,
        dtype,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=windows,
        rotates=[window is not None for window in windows],
        norms="both",
        ffns=[experts] * num_layers,
    )


FAMILY = ModelFamily(
    name="kolibri1",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, norms=_NORMS, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
