"""Qwen3-Next: Qwen3.5's mixture of experts, with the tensors of the delta rule packed by key head.

Source: ``modeling_qwen3_next`` of Hugging Face transformers. Published is 80B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import packed_delta_specs
from jaxinfer.models.experts import expert_specs, sparse_layers
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.models.qwen3_5 import IGNORED_TENSORS, NORMS, hybrid_config
from jaxinfer.models.qwen3_5_moe import TENSORS, gated_experts
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    renormalised = hf.flag(config, "norm_topk_prob", True)
    experts = gated_experts(config, renormalised=renormalised)
    return hybrid_config(config, dtype, sparse_layers(config, experts))


FAMILY = ModelFamily(
    name="qwen3_next",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NORMS,
        mixers=packed_delta_specs,
        experts=partial(expert_specs, names=TENSORS),
    ),
    ignored_tensors=IGNORED_TENSORS,
)
