"""Ling lite, Ling plus and Ling-Coder (BailingMoe), Ling 2.0 and Ring 2.0 (BailingMoeV2).

The second generation has DeepSeek-V3's routing, norms of heads, and heads that rotate in part.

Source: the ``modeling_bailing_moe`` and ``modeling_bailing_moe_v2`` of the published files; they
are not in transformers. Tests compare with a reference in NumPy (``tests/kit/bailing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.bailing_parts import (
    NAMES,
    TENSORS,
    biased_sigmoid_experts,
    check_keys,
    plain_experts,
    with_rotated_part,
)
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    check_keys(config)
    second = "BailingMoeV2ForCausalLM" in config.get("architectures", ())
    experts = biased_sigmoid_experts(config) if second else plain_experts(config)
    head_dim = hf.head_dim(config)
    return gqa_config(
        with_rotated_part(config, head_dim) if second else config,
        dtype,
        qkv_bias=hf.flag(config, "use_qkv_bias", False),
        qk_norm="head" if second and hf.flag(config, "use_qk_norm", True) else None,
        head_dim=head_dim,
        partial_rotary=1.0 if second else None,
        ffns=networks_by_layer(config, experts, first=0),
    )


FAMILY = ModelFamily(
    name="bailing",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=NAMES, experts=partial(expert_specs, names=TENSORS)),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq"),
)
