"""BioGPT: OPT with scaled embeddings.

Source: ``modeling_biogpt`` of Hugging Face transformers.
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

_FIRST_POSITION = 2  # not a key of config.json
_NORM_EPS = 1e-5  # also where config.json says otherwise
_NORMS = NormSources(names=("self_attn_layer_norm", "final_layer_norm"))
_NAMES = TensorNames(
    embed="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    layer="biogpt.layers.{}.",
    final_norm="biogpt.layer_norm",
    head="output_projection",
    o="self_attn.out_proj",
    into=("fc1",),
    down="fc2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for unused in ("layer_norm_eps", "num_key_value_heads"):  # by transformers
        config.get(unused)
    width, layers, positions = (
        hf.positive_int(config, key)
        for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    )
    heads = hf.positive_int(config, "num_attention_heads")
    return plain_config(
        config,
        dtype,
        sizes={"num_key_value_heads": heads},
        num_layers=layers,
        activation=hf.activation(config, "hidden_act", "gelu"),
        norm_eps=_NORM_EPS,
        embed_scale=width**0.5 if hf.flag(config, "scale_embedding", True) else None,
        num_positions=positions,
        first_position=_FIRST_POSITION,
    )


FAMILY = ModelFamily(
    name="biogpt",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"output_projection\.weight",),
)
