"""Mixtral: Mistral's decoder whose layers have experts.

Source: ``modeling_mixtral`` of Hugging Face transformers (Jiang et al. 2024, arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import MIXTRAL_TENSORS, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

_THETA = 1e6  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    routing = Routing(experts_per_token(config), renormalised=True)
    experts = experts_config(
        config, count="num_local_experts", width="intermediate_size", routing=routing
    )
    config.get("router_jitter_noise")  # in training
    window = None
    if config.get("sliding_window") is not None:
        window = hf.positive_int(config, "sliding_window")
    windows = windows_by_layer(config, window)
    return gqa_config(
        config,
        dtype,
        windows=windows,
        theta=_THETA,
        ffns=[experts] * len(windows),
    )


FAMILY = ModelFamily(
    name="mixtral",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=MIXTRAL_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
