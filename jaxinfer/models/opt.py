"""OPT: LayerNorm, learned positions, biases, and a network without a gate.

The 350M model, whose norms are after blocks and whose embeddings are narrower, is refused.

Source: ``modeling_opt`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    NormSources,
    gqa_config,
    gqa_param_specs,
)
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.rope import RopeConfig

_EPS, _FIRST_POSITION = 1e-5, 2  # not keys of config.json
_NORMS = NormSources(names=("self_attn_layer_norm", "final_layer_norm"))
_NAMES = TensorNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}.",
    final_norm="model.decoder.final_layer_norm",
    o="self_attn.out_proj",
    into=("fc1",),
    down="fc2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "do_layer_norm_before", True)
    hf.supported_only(config, "_remove_final_layer_norm", False)
    hf.supported_only(config, "layer_norm_elementwise_affine", True)
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    if (narrow := hf.positive_int(config, "word_embed_proj_dim", width)) != width:
        raise ConfigError(
            f"config key 'word_embed_proj_dim' is {narrow}, and projections of embeddings are not "
            "supported; use another checkpoint"
        )
    bias, positions = (
        hf.flag(config, "enable_bias", True),
        hf.positive_int(config, "max_position_embeddings"),
    )
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return gqa_config(
        hf.with_values(config, {"intermediate_size": hf.positive_int(config, "ffn_dim")}),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        qk_norm=None,
        windows=(None,) * num_layers,
        rope=RopeConfig(width // heads, 10000.0, None, None),  # which no layer has
        rotates=(False,) * num_layers,
        gated=False,
        activation=hf.activation(config, "activation_function", "relu"),
        norm="layer",
        norm_eps=_EPS,
        tied=True,
        num_positions=positions,
        first_position=_FIRST_POSITION,
    )


FAMILY = ModelFamily(
    name="opt",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight",),
)
