"""XGLM: OPT with scaled embeddings and sinusoids for positions.

Source: ``modeling_xglm`` of Hugging Face transformers.
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

_NORM_EPS, _FIRST_POSITION = 1e-5, 2  # not keys of config.json
_NORMS = NormSources(names=("self_attn_layer_norm", "final_layer_norm"))
_NAMES = TensorNames(
    final_norm="model.layer_norm",
    o="self_attn.out_proj",
    into=("fc1",),
    down="fc2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "add_cross_attention", False)
    width, heads, layers, inner = (
        hf.positive_int(config, key)
        for key in ("d_model", "attention_heads", "num_layers", "ffn_dim")
    )
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    return plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation=hf.activation(config, "activation_function", "gelu"),
        norm_eps=_NORM_EPS,
        embed_scale=width**0.5 if hf.flag(config, "scale_embedding", True) else None,
        sinusoids=Sinusoids(),
        first_position=_FIRST_POSITION,
    )


FAMILY = ModelFamily(
    name="xglm",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight", r"model\.embed_positions\.weights"),
)
