"""DeepSeek-OCR 2's text decoder: Llama's attention, and DeepSeek-V2's experts.

Source: ``modeling_deepseek_ocr2`` of Hugging Face transformers. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    expert_specs,
    experts_config,
    gated_network,
    grouped_routing,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_SHARED = 2  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_bias", False)
    hf.supported_only(config, "norm_topk_prob", False)  # which transformers does not know
    config.get("head_dim")  # derived, also where it is given
    bias = hf.flag(config, "attention_bias", False)
    each = hf.positive_int(config, "moe_intermediate_size")
    shared = hf.positive_int(config, "n_shared_experts", _SHARED) * each
    experts = experts_config(
        config,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(config, "softmax"),
        shared=gated_network(config, shared),
    )
    heads = hf.positive_int(config, "num_attention_heads")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=hf.positive_int(config, "hidden_size") // heads,
        ffns=networks_by_layer(config, experts, first=0),
    )


FAMILY = ModelFamily(
    name="deepseek_ocr2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=expert_specs),
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.(sam_model|qwen2_model|projector|vision_tower|multi_modal_projector)\..*",
        r"model\.view_sep[ae]r[ae]tor",
    ),
    optional_prefix="model.language_model.",
)
