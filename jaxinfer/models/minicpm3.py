"""MiniCPM3: DeepSeek's latent attention, dense networks, factors on embeddings and outputs.

Source: ``modeling_minicpm3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    dense_network,
    latent_config,
    latent_param_specs,
)
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.residual_spec import PlainResidual

# transformers' defaults
_EMBED, _DEPTH, _BASE, _QUERY_RANK = 12.0, 1.4, 256, 768


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    mlp_bias = hf.flag(config, "mlp_bias", False)
    layers, width = (hf.positive_int(config, key) for key in ("num_hidden_layers", "hidden_size"))
    heads = hf.positive_int(config, "num_attention_heads")
    given = {"q_lora_rank": config.get("q_lora_rank", _QUERY_RANK)}
    given["v_head_dim"] = hf.positive_int(config, "v_head_dim", width // heads)
    depth = 1.0  # a key that is null switches its factor off
    if config.get("scale_depth", _DEPTH) is not None:
        depth = hf.positive_float(config, "scale_depth", _DEPTH) * layers**-0.5
    base = width
    if config.get("dim_model_base", _BASE) is not None:
        base = hf.positive_int(config, "dim_model_base", _BASE)
    own = hf.with_values(config, given)
    return latent_config(
        own,
        dtype,
        interleaved=False,
        ffns=[dense_network(own, bias=mlp_bias)] * layers,
        embed_scale=hf.positive_float(config, "scale_emb", _EMBED),
        residual=PlainResidual(scale=depth),
        logit_scale=base / width,
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", True),
    )


FAMILY = ModelFamily(
    name="minicpm3",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
