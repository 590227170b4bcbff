"""GPT-NeoX and Pythia: parallel blocks with a LayerNorm each, biases, a network without a gate.

The rows of a head's query, key and value are together in one tensor; a quarter of each head
rotates.

Source: ``modeling_gpt_neox`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gpt_neox_parts import neox_config, neox_ignored, neox_names
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.25  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", True)
    return neox_config(
        config,
        dtype,
        partial_rotary=_PARTIAL_ROTARY,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        parallel=hf.flag(config, "use_parallel_residual", True),
    )


FAMILY = ModelFamily(
    name="gpt_neox",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=neox_names("gpt_neox")),
    ignored_tensors=neox_ignored("gpt_neox"),
)
