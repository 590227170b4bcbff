"""CTRL: sinusoids for positions, scaled embeddings, and a head with biases.

Source: ``modeling_ctrl`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.positions import Sinusoids

_EPS = 1e-6
_NORMS = NormSources(names=("layernorm1", "layernorm2"))
_NAMES = TensorNames(
    embed="transformer.w",
    layer="transformer.h.{}.",
    final_norm="transformer.layernorm",
    qkv=("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv"),
    o="multi_head_attention.dense",
    into=("ffn.0",),
    down="ffn.2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    width, heads, layers, inner = (
        hf.positive_int(config, key) for key in ("n_embd", "n_head", "n_layer", "dff")
    )
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": hf.positive_int(config, "n_positions"),
    }
    # only of the last norm in transformers
    hf.supported_only(config, "layer_norm_epsilon", _EPS)
    return plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation="relu",
        norm_eps=_EPS,
        head_bias=True,
        embed_scale=width**0.5,
        sinusoids=Sinusoids(open_end=True),
    )


FAMILY = ModelFamily(
    name="ctrl",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight", r"transformer\.pos_encoding"),
)
