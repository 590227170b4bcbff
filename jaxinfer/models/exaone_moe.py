"""EXAONE MoE (K-EXAONE): windows in three of four layers, which alone rotate; biased experts.

Source: ``modeling_exaone_moe`` of Hugging Face transformers.
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
from jaxinfer.models.layer_kinds import exaone_windows
from jaxinfer.nn.decoder_config import DecoderSpec

_SCALE = 2.5  # transformers' default
_TENSORS = ExpertTensors(choice_bias="mlp.e_score_correction_bias")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    windows, rotates = exaone_windows(config)
    own = hf.with_defaults(config, {"routed_scaling_factor": _SCALE})
    experts = biased_experts(own, count="num_experts", shared="num_shared_experts")
    return gqa_config(
        config,
        dtype,
        qk_norm="head",
        windows=windows,
        rotates=rotates,
        ffns=networks_by_layer(config, experts, first=1),
    )


FAMILY = ModelFamily(
    name="exaone_moe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
