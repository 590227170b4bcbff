"""GPT-NeoX and Pythia: parallel blocks with a LayerNorm each, biases, a network without a gate.

The rows of a head's query, key and value are together in one tensor; a quarter of each head
rotates.

Source: ``modeling_gpt_neox`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.25  # transformers' default
_NAMES = TensorNames(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    into=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    packed=True,
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", True)
    heads = hf.positive_int(config, "num_attention_heads")
    head_dim = hf.positive_int(config, "hidden_size") // heads
    part = hf.positive_float(config, "rotary_pct", _PARTIAL_ROTARY)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=rope_config(config, head_dim, theta_key="rotary_emb_base", partial=part),
        gated=False,
        activation=hf.activation(config, "hidden_act", "gelu"),
        norm="layer",
        parallel=hf.flag(config, "use_parallel_residual", True),
    )


FAMILY = ModelFamily(
    name="gpt_neox",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"embed_out\.weight",
    ),
)
