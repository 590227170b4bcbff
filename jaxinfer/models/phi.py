"""Phi-1 and Phi-2: parallel blocks that share a LayerNorm, biases, also of the head.

Half of each head rotates by default. Heads may have LayerNorms.

Source: ``modeling_phi`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import even_rotary, rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.5  # transformers' default
_NORMS = NormSources(names=("input_layernorm",))
_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    o="self_attn.dense",
    into=("mlp.fc1",),
    down="mlp.fc2",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gqa_config(
        config,
        dtype,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="layer" if hf.flag(config, "qk_layernorm", False) else None,
        rope=even_rotary(rope_config(config, hf.head_dim(config), partial=_PARTIAL_ROTARY)),
        gated=False,
        activation=hf.activation(config, "hidden_act", "gelu_new"),
        norms="shared",
        norm="layer",
        parallel=True,
        head_bias=True,
    )


FAMILY = ModelFamily(
    name="phi",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
