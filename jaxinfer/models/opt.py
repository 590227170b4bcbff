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
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import DecoderSpec

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
    affine = hf.flag(config, "layer_norm_elementwise_affine", True)
    width = hf.positive_int(config, "hidden_size")
    if (narrow := hf.positive_int(config, "word_embed_proj_dim", width)) != width:
        raise ConfigError(
            f"config key 'word_embed_proj_dim' is {narrow}, and projections of embeddings are not "
            "supported; use another checkpoint"
        )
    return plain_config(
        config,
        dtype,
        sizes={"intermediate_size": hf.positive_int(config, "ffn_dim")},
        num_layers=hf.positive_int(config, "num_hidden_layers"),
        activation=hf.activation(config, "activation_function", "relu"),
        norm="layer" if affine else "layer_plain",
        norm_eps=_EPS,
        bias=hf.flag(config, "enable_bias", True),
        num_positions=hf.positive_int(config, "max_position_embeddings"),
        first_position=_FIRST_POSITION,
    )


FAMILY = ModelFamily(
    name="opt",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight",),
)
