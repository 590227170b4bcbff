"""Mamba and Falcon Mamba: a decoder of selective state spaces alone, without networks.

Source: ``modeling_mamba`` and ``modeling_falcon_mamba`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.mamba import mamba_config, mamba_specs
from jaxinfer.models.state_space import NAMES, state_space_decoder
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    more: dict[str, Any] = {}
    if "FalconMambaForCausalLM" in config.get("architectures", ()):
        eps = hf.positive_float(config, "mixer_rms_eps", 1e-6)
        more = {"inner_norms": "plain", "norm_eps": eps}
    return state_space_decoder(config, dtype, mamba_config(config, **more), tied=True)


FAMILY = ModelFamily(
    name="mamba",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm",)),
        names=NAMES,
        mixers=partial(mamba_specs, name="mixer."),
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
