"""DeepSeek-V2: latent attention, and experts chosen by a softmax, perhaps within groups.

Source: ``modeling_deepseek_v2`` of Hugging Face transformers. Published are V2, V2.5 and V2-Lite,
whose queries have no latent. Weights of experts are not renormalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, grouped_routing
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    expert_layers,
    latent_config,
    latent_param_specs,
    shared_experts,
)
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "norm_topk_prob", False)  # which transformers' code ignores
    mlp_bias = hf.flag(config, "mlp_bias", False)
    first, has_experts = expert_layers(config, 0)
    experts = None
    if has_experts:
        experts = experts_config(
            config,
            count="n_routed_experts",
            width="moe_intermediate_size",
            routing=grouped_routing(config, "softmax"),
            shared=shared_experts(config, bias=mlp_bias),
        )
    return latent_config(
        config,
        dtype,
        interleaved=True,
        first_expert_layer=first,
        mlp_bias=mlp_bias,
        experts=experts,
    )


FAMILY = ModelFamily(
    name="deepseek_v2",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
