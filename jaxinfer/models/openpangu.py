"""openPangu-Embedded (Huawei): Llama's decoder, with biases of queries, keys and values.

Source: the published ``modeling_openpangu_dense.py``; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "sandwich_norm", False)
    hf.supported_only(config, "param_sink_number", 0)
    names = ("attention_bias", "bias")
    bias = any([hf.flag(config, name, False) for name in names])
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "qkv_bias", bias),
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=hf.head_dim(config),
    )


FAMILY = ModelFamily(
    name="openpangu",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
