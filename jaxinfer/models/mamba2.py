"""Mamba-2: a decoder of state spaces alone, whose layers have no network.

Source: ``modeling_mamba2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.mamba import MAMBA2_KEYS, mamba2_config, mamba2_specs
from jaxinfer.models.state_space import NAMES, state_space_decoder
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")
    mamba = mamba2_config(config, MAMBA2_KEYS, heads=128, state=128, groups=8)
    return state_space_decoder(config, dtype, mamba, tied=False)


FAMILY = ModelFamily(
    name="mamba2",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm",)),
        names=NAMES,
        mixers=partial(mamba2_specs, name="mixer."),
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
