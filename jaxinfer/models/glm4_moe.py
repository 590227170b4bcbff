"""GLM-4.5, 4.6 and 4.7: experts as in DeepSeek-V3, grouped-query attention; half of heads rotates.

Source: ``modeling_glm4_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, experts_config, gated_network, grouped_routing
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardSpec

_PARTIAL_ROTARY = 0.5  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    windows = windows_by_layer(config, None)
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        qk_norm="head" if hf.flag(config, "use_qk_norm", False) else None,
        windows=windows,
        partial_rotary=_PARTIAL_ROTARY,
        ffns=_networks(config, len(windows)),
    )


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: dense in the first ones."""
    each = hf.positive_int(config, "moe_intermediate_size")
    shared = each * hf.layer_index(config, "n_shared_experts", 1)
    given = {"norm_topk_prob": hf.flag(config, "norm_topk_prob", True)}
    experts = experts_config(
        config,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(hf.with_values(config, given), "sigmoid"),
        choice_bias=True,
        shared=gated_network(config, shared) if shared else None,
    )
    width = hf.positive_int(config, "intermediate_size")
    dense = gated_network(config, width)
    first = min(hf.layer_index(config, "first_k_dense_replace", 1), num_layers)
    return [*[dense] * first, *[experts] * (num_layers - first)]


FAMILY = ModelFamily(
    name="glm4_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
