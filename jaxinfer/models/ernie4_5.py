"""ERNIE 4.5 (dense and mixtures): the shared decoder; heads rotate by adjacent components.

Source: ``modeling_ernie4_5`` and ``modeling_ernie4_5_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.ernie_parts import ERNIE_TENSORS, ernie_config
from jaxinfer.models.experts import expert_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return ernie_config(config, dtype)


FAMILY = ModelFamily(
    name="ernie4_5",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, interleaved=True, experts=partial(expert_specs, names=ERNIE_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
