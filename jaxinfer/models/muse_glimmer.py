"""Muse Glimmer's text decoder: windows, whose layers alone rotate, gates on heads, norms around
blocks, and embeddings, queries and keys that are normalised without weights.

Source: ``modeling_muse_glimmer`` of Hugging Face transformers. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.muse_parts import NAMES, POST_EPS, muse_config
from jaxinfer.models.params import stack_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _THETA, _QUERY_FACTOR, _LOGIT_FACTOR = 128, 10000.0, 3.87, 0.19611613513818404
_NORMS = NormSources(  # the final norm multiplies by its weight alone
    names=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    several=stack_plus_one,
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("hidden_act")  # not the one in use
    return muse_config(
        config,
        dtype,
        head_dim=_HEAD_DIM,
        query_factor=_QUERY_FACTOR,
        logit_factor=_LOGIT_FACTOR,
        theta=_THETA,
        attention={},
        activation=hf.activation(config, "hidden_activation", "silu"),
        norms="both",
        post_norm_eps=hf.positive_float(config, "post_norm_eps", POST_EPS),
    )


FAMILY = ModelFamily(
    name="muse_glimmer",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=NAMES),
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.vision_(tower|adapter|projection)\..*",
        r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight",  # of GGUF files, whose reader has them
    ),
    optional_prefix="model.language_model.",
)
