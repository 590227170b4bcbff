"""Nemotron and Minitron: LayerNorm whose weights are stored minus 1, a network without a gate, by
default of squared ReLUs; half of each head rotates.

Source: ``modeling_nemotron`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.names import PLAIN
from jaxinfer.models.params import affine_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.5  # transformers' default
_NORMS = NormSources(several=affine_plus_one)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    part = hf.positive_float(config, "partial_rotary_factor", _PARTIAL_ROTARY)
    hf.supported_only(config, "rope_percent", part)
    hf.supported_only(config, "kv_channels", hf.head_dim(config))
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        partial_rotary=_PARTIAL_ROTARY,
        gated=False,
        activation=hf.activation(config, "hidden_act", "relu2"),
        norm="layer",
        norm_eps=hf.positive_float(config, "norm_eps", 1e-5),
        norm_dtype=jnp.dtype(jnp.float32),
    )


FAMILY = ModelFamily(
    name="nemotron",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=PLAIN),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
