"""StarCoder2: LayerNorm, biases, windows, and a network without a gate.

Source: ``modeling_starcoder2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_NAMES = TensorNames(into=("mlp.c_fc",), down="mlp.c_proj")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_type", "default")
    hf.supported_only(config, "norm_type", "layer_norm")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        hf.supported_only(config, key, True)
    hf.supported_only(config, "scale_attn_weights", True)
    config.get("activation_function")  # hidden_act is the one in use
    eps = hf.positive_float(config, "norm_epsilon", 1e-5)
    hf.supported_only(config, "layer_norm_epsilon", eps)
    bias = hf.flag(config, "use_bias", True)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=windows_by_layer(config, sliding_window(config, None)),
        gated=False,
        activation=hf.activation(config, "hidden_act", "gelu_pytorch_tanh"),
        norm="layer",
        norm_eps=eps,
        tied=True,
    )


FAMILY = ModelFamily(
    name="starcoder2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
