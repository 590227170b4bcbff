"""VaultGemma: Gemma 2 without norms after blocks.

Source: ``modeling_vaultgemma`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import gemma2
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.params import plus_one, stack_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec

_NORMS = NormSources(
    names=("input_layernorm", "pre_feedforward_layernorm"), one=plus_one, several=stack_plus_one
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    spec = gemma2.config_from_hf(config, dtype)
    return replace(spec, layers=tuple(replace(layer, norms="before") for layer in spec.layers))


FAMILY = ModelFamily(
    name="vaultgemma",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
