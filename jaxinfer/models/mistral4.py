"""Mistral 4: latent attention whose queries grow with the position, experts by a softmax.

Source: ``modeling_mistral4`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.hf_rope import query_growth, with_rope, without_partial
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_config, latent_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_QUERY_RANK = 1024
_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    nope, rope_dim = (
        hf.positive_int(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    hf.supported_only(config, "head_dim", nope + rope_dim)
    groups = hf.positive_int(config, "n_group", 1) > 1  # of which the two best count
    method: dict[str, Any] = {
        "topk_method": "noaux_tc" if groups else "greedy",
        "head_dim": rope_dim,
        "q_lora_rank": config.get("q_lora_rank", _QUERY_RANK),
        "norm_topk_prob": hf.flag(config, "norm_topk_prob", True),
    }
    own, growth = query_growth(with_rope(hf.with_values(config, method), _ROPE))
    experts = biased_experts(own, scores="softmax", choice_bias=False)
    return latent_config(
        without_partial(own, rope_dim / (nope + rope_dim)),
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        ffns=networks_by_layer(config, experts, first=0),
        growth=growth,
    )


FAMILY = ModelFamily(
    name="mistral4",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
    stacked_experts=True,
)
