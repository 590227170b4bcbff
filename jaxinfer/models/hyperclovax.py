"""HyperCLOVA X: factors as in Granite, and norms after blocks, too.

Source: ``modeling_hyperclovax`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    PRE_NORMS,
    NormSources,
    gqa_config,
    gqa_param_specs,
)
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.residual_spec import PlainResidual

_EPS = 1e-6  # transformers' default
_NORMS = NormSources(("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    scale = config.get("attention_multiplier")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        scale=None if scale is None else hf.positive_float(config, "attention_multiplier"),
        norms="both" if hf.flag(config, "use_post_norm", True) else "before",
        norm_eps=hf.positive_float(config, "rms_norm_eps", _EPS),
        embed_scale=hf.positive_float(config, "embedding_multiplier", 1.0),
        residual=PlainResidual(scale=hf.positive_float(config, "residual_multiplier", 1.0)),
        logit_scale=hf.positive_float(config, "logits_scaling", 1.0),
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the norms that the layers have."""
    norms = _NORMS if config.layers[0].norms == "both" else PRE_NORMS
    return gqa_param_specs(config, norms=norms)


FAMILY = ModelFamily(
    name="hyperclovax",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
