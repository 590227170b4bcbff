"""Granite 3 (dense, mixtures): factors on embeddings, blocks' outputs, scores and logits.

Source: ``modeling_granite``, ``modeling_granitemoe`` and ``modeling_granitemoeshared`` of Hugging
Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_param_specs, windows_by_layer
from jaxinfer.models.granite_parts import granite_config, granite_expert_specs
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig
from pallas_kernels.route.routing import Routing

_MIXTURES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, windows = hf.flag(config, "attention_bias", False), windows_by_layer(config, None)
    ffns = None
    names = config.get("architectures", ())
    if any(name in names for name in _MIXTURES):
        # the softmax is over the logits of the chosen experts
        routing = Routing(experts_per_token(config), renormalised=True)
        width = "intermediate_size"
        experts = experts_config(config, count="num_local_experts", width=width, routing=routing)
        if "GraniteMoeSharedForCausalLM" in names:
            experts = replace(experts, shared=_shared(config))
        ffns = [experts] * len(windows)
    mlp_bias = ffns is None and hf.flag(config, "mlp_bias", False)
    return granite_config(config, dtype, bias=bias, windows=windows, mlp_bias=mlp_bias, ffns=ffns)


def _shared(config: Mapping[str, Any]) -> FeedForwardConfig | None:
    """The network of all tokens, if there is one."""
    width = hf.layer_index(config, "shared_intermediate_size", 0)
    return FeedForwardConfig(width=width, activation="silu", gated=True) if width else None


FAMILY = ModelFamily(
    name="granite",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=granite_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
