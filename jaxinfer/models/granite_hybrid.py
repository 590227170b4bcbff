"""Granite 4: Mamba-2 in most layers, attention in the others, and a dense network beside experts.

Source: ``modeling_granitemoehybrid`` of Hugging Face transformers. Some published ones have no
Mamba-2, or no experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_param_specs, with_mixers
from jaxinfer.models.granite_parts import SHARED_NAMES, granite_config, granite_expert_specs
from jaxinfer.models.mamba import mamba2_config, mamba2_specs, with_attention
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, FeedForwardSpec
from pallas_kernels.route.routing import Routing

_SHARED_WIDTH = 1024  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    hf.supported_only(config, "position_embedding_type", "nope", "rope")
    rotates = config.get("position_embedding_type") == "rope"
    decoder = granite_config(
        config,
        dtype,
        windows=(None,) * num_layers,
        bias=hf.flag(config, "attention_bias", False),
        ffns=[_network(config)] * num_layers,
        rotates=[rotates] * num_layers,
    )
    attends = with_attention(config, "layer_types", "layers_block_type") or [False] * num_layers
    mamba = mamba2_config(config)
    return with_mixers(decoder, {i: mamba for i in range(num_layers) if not attends[i]})


def _network(config: Mapping[str, Any]) -> FeedForwardSpec:
    """The network of each layer: a dense one, with experts beside it if there are some."""
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    width = hf.positive_int(config, "shared_intermediate_size", _SHARED_WIDTH)
    shared = FeedForwardConfig(width=width, activation="silu", gated=True)
    if config.get("num_local_experts") == 0:
        for unused in ("num_experts_per_tok", "intermediate_size"):
            config.get(unused)
        return shared
    return experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        # the softmax is over the logits of the chosen experts
        routing=Routing(experts_per_token(config), renormalised=True),
        shared=shared,
    )


FAMILY = ModelFamily(
    name="granite_hybrid",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, names=SHARED_NAMES, experts=granite_expert_specs, mixers=mamba2_specs
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
