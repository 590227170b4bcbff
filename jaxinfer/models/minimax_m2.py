"""MiniMax-M2: experts chosen by biased sigmoids, norms of all heads, of which a part rotates.

Source: ``modeling_minimax_m2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import MIXTRAL_TENSORS, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _THETA = 128, 5e6
_TENSORS = MIXTRAL_TENSORS._replace(choice_bias="block_sparse_moe.e_score_correction_bias")
_BETAS = ("full_attention", "linear_attention", "mlp")  # factors on blocks' inputs, of MiniMax-01
_UNUSED = ("mlp_intermediate_size", "router_jitter_noise", "shared_moe_mode")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for beta in _BETAS:
        hf.supported_only(config, f"layernorm_{beta}_beta", 1)
    hf.supported_only(config, "use_qk_norm", True)
    hf.supported_only(config, "qk_norm_type", "per_layer")
    hf.supported_only(config, "use_routing_bias", True)
    hf.supported_only(config, "scoring_func", "sigmoid")
    hf.supported_only(config, "shared_intermediate_size", 0)
    for key in _UNUSED:
        config.get(key)
    kinds, windows = config.get("attn_type_list") or [], windows_by_layer(config, None)
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise ConfigError(
            f"config key 'attn_type_list' is {short(kinds)}, and only 1, softmax attention, is "
            "supported; use a checkpoint of MiniMax-M2"
        )
    routing = Routing(experts_per_token(config), scores="sigmoid", renormalised=True)
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=routing,
        choice_bias=True,
    )
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    return gqa_config(
        config,
        dtype,
        qk_norm="all_heads",
        head_dim=head_dim,
        theta=_THETA,
        partial_rotary=hf.positive_int(config, "rotary_dim", head_dim) / head_dim,
        windows=windows,
        ffns=[experts] * len(windows),
    )


FAMILY = ModelFamily(
    name="minimax_m2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
