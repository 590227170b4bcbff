"""A.X K1 (SK Telecom): DeepSeek-V3's decoder with a norm of the experts' output.

Source: ``modeling_axk1`` of Hugging Face transformers. Files whose "topk_method" is another than
"noaux_tc" have no biases of choices, which are zeros then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, grouped_routing, networks_by_layer
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    latent_config,
    latent_param_specs,
    shared_experts,
)
from jaxinfer.nn.decoder_config import DecoderSpec

_METHOD = "noaux_tc"
_DEFAULTS = MappingProxyType(  # transformers'
    {
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    own = hf.with_defaults(config, _DEFAULTS)
    experts = experts_config(
        own,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(hf.with_values(own, {"topk_method": _METHOD}), "sigmoid"),
        choice_bias=config.get("topk_method", _METHOD) == _METHOD,
        shared=shared_experts(own),
    )
    decoder = latent_config(
        own,
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        ffns=networks_by_layer(config, experts, first=1),
    )
    layers = (
        layer if layer.ffn.experts is None else replace(layer, norms="ffn_both")
        for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


FAMILY = ModelFamily(
    name="axk1",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    # which the published files have in dense layers, too
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"model\.layers\.\d+\.post_mlp_layernorm\.weight"),
)
