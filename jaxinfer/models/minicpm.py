"""MiniCPM 1, 2, 4 and 4.1: factors on embeddings, blocks' outputs and logits.

Source: the published ``modeling_minicpm.py``. The sparse attention of MiniCPM 4 to long contexts
(``sparse_config``) is not used; its layers attend to all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.residual_spec import PlainResidual


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("sparse_config")
    hf.supported_only(config, "num_experts", 0)
    layers, width = (hf.positive_int(config, key) for key in ("num_hidden_layers", "hidden_size"))
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        embed_scale=hf.positive_float(config, "scale_emb", 1.0),
        residual=PlainResidual(scale=hf.positive_float(config, "scale_depth", 1.0) * layers**-0.5),
        logit_scale=hf.positive_int(config, "dim_model_base", width) / width,
        tied=True,
    )


FAMILY = ModelFamily(
    name="minicpm",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
