"""Gemma 1: norms and embeddings as in Gemma 3, without windows and norms of heads.

Source: ``modeling_gemma`` of Hugging Face transformers. Files that say "gelu" mean the
approximation by tanh.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.params import plus_one, stack_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM = 256  # transformers' default
_NORMS = NormSources(one=plus_one, several=stack_plus_one)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "use_bidirectional_attention", False)
    hf.supported_only(config, "hidden_activation", "gelu_pytorch_tanh", "gelu")
    bias = hf.flag(config, "attention_bias", False)
    name = hf.activation(config, "hidden_act", "gelu")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        activation="gelu_tanh" if name == "gelu" else name,
        tied=True,
        norm_dtype=jnp.dtype(jnp.float32),
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
    )


FAMILY = ModelFamily(
    name="gemma",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
