"""DeepSeek-V3 and R1, and Kimi-K2: latent attention, and experts chosen by biased sigmoids.

Source: ``modeling_deepseek_v3`` of Hugging Face transformers. The weights of experts are the scores
without the bias. Kimi-K2.5's tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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

# transformers' defaults
_NUM_DENSE = 3  # of first_k_dense_replace
_ROUTING = MappingProxyType({"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4})


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    first, has_experts = expert_layers(config, _NUM_DENSE)
    experts = None
    if has_experts:
        hf.supported_only(config, "topk_method", "noaux_tc")
        experts = experts_config(
            config,
            count="n_routed_experts",
            width="moe_intermediate_size",
            routing=grouped_routing(hf.with_defaults(config, _ROUTING), "sigmoid"),
            choice_bias=True,
            shared=shared_experts(config),
        )
    return latent_config(
        config,
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        first_expert_layer=first,
        mlp_bias=False,
        experts=experts,
    )


FAMILY = ModelFamily(
    name="deepseek_v3",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"(vision_tower|mm_projector)\..*"),
    optional_prefix="language_model.",  # of Kimi-K2.5
)
