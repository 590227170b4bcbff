"""Sarvam's mixtures of experts with grouped-query attention: GLM-4.5's with other names.

Source: ``configuration_sarvam_moe`` of Hugging Face transformers, which loads them as
``Glm4MoeForCausalLM``. Published files have keys of their own, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, biased_experts, expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _THETA, _SCALE = 64, 8e6, 2.5
_TENSORS = ExpertTensors(choice_bias="mlp.gate.expert_bias")
_NAMES = TensorNames(
    embed="model.word_embeddings",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    qk_norms=("attention.query_layernorm", "attention.key_layernorm"),
)
_OTHER_NAMES = (
    ("n_routed_experts", "num_experts"),
    ("n_shared_experts", "num_shared_experts"),
    ("attention_bias", "use_qkv_bias"),
    ("scoring_func", "score_function"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_router_enable_expert_bias", True)
    hf.supported_only(config, "moe_shared_expert_intermediate_size", _expert_width(config))
    hf.supported_only(config, "use_bias", False)
    hf.supported_only(config, "use_rmsnorm", True)
    given = {name: config.get(other) for name, other in _OTHER_NAMES}
    values = {name: value for name, value in given.items() if value is not None}
    scale = hf.positive_float(config, "routed_scaling_factor", _SCALE)
    own = hf.with_values(config, {**values, "routed_scaling_factor": scale})
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(own, "attention_bias", False),
        qk_norm="head" if hf.flag(config, "use_qk_norm", True) else None,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        partial_rotary=1.0,
        ffns=networks_by_layer(config, biased_experts(own), first=1),
    )


def _expert_width(config: Mapping[str, Any]) -> int:
    return hf.positive_int(config, "moe_intermediate_size")


FAMILY = ModelFamily(
    name="sarvam_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, names=_NAMES, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
