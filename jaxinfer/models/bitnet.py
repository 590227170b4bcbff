"""BitNet b1.58 with weights of floats: norms of heads' outputs and of hidden values, squared ReLUs.

Files whose weights are ternary, or whose activations are rounded, are refused: they have a
``quantization_config``.

Source: ``modeling_bitnet`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig

_THETA, _EPS = 500000.0, 1e-5  # transformers' defaults
_NAMES = TensorNames(o_norm="self_attn.attn_sub_norm", down_norm="mlp.ffn_sub_norm")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, windows = hf.flag(config, "attention_bias", False), windows_by_layer(config, None)
    eps = hf.positive_float(config, "rms_norm_eps", _EPS)
    ffn = FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "hidden_act", "relu2"),
        gated=True,
        norm=eps,
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        windows=windows,
        theta=_THETA,
        ffns=[ffn] * len(windows),
        norm_eps=eps,
        attention={"out_norm": eps},
    )


FAMILY = ModelFamily(
    name="bitnet",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
