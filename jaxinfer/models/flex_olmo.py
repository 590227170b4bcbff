"""FlexOlmo: OLMo 2's attention and norms of blocks' outputs, and experts in all layers.

Source: ``modeling_flex_olmo`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

_THETA = 5e5  # transformers' default
_NORMS = NormSources(names=("post_attention_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, windows = hf.flag(config, "attention_bias", False), windows_by_layer(config, None)
    renormalised = hf.flag(config, "norm_topk_prob", False)
    routing = Routing(experts_per_token(config), renormalised=renormalised)
    width = "intermediate_size"
    experts = experts_config(config, count="num_experts", width=width, routing=routing)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all_heads",
        theta=_THETA,
        windows=windows,
        norms="after",
        ffns=[experts] * len(windows),
    )


FAMILY = ModelFamily(
    name="flex_olmo",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, experts=expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
