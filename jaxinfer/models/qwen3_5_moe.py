"""Qwen3.5 to 3.8's mixtures of experts (text), with an expert for all tokens behind a gate.

Source: ``modeling_qwen3_5_moe`` of Hugging Face transformers. Published are 35B-A3B, 122B-A10B and
397B-A17B. A layer's experts are stacked in two tensors, or have tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import delta_specs
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    experts_per_token,
    sparse_layers,
)
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.models.qwen3_5 import IGNORED_TENSORS, NORMS, hybrid_config
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, FeedForwardConfig
from pallas_kernels.route.routing import Routing

TENSORS = ExpertTensors(shared="mlp.shared_expert.")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "norm_topk_prob", True)
    return hybrid_config(config, dtype, sparse_layers(config, gated_experts(config)))


def gated_experts(config: Mapping[str, Any], *, renormalised: bool = True) -> ExpertsConfig:
    """Experts, and one for all tokens that a gate weights."""
    shared = FeedForwardConfig(
        width=hf.positive_int(config, "shared_expert_intermediate_size"),
        activation="silu",
        gated=True,
    )
    return experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=Routing(experts_per_token(config), renormalised=renormalised),
        shared=shared,
        shared_gate=True,
    )


FAMILY = ModelFamily(
    name="qwen3_5_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NORMS,
        mixers=delta_specs,
        experts=partial(expert_specs, names=TENSORS),
    ),
    ignored_tensors=IGNORED_TENSORS,
    optional_prefix="model.language_model.",
    stacked_experts=True,
)
