"""Bamba: Mamba-2, and in some layers attention whose heads rotate half.

Source: ``modeling_bamba`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.mamba import mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_ROTATED = 0.5
_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    into=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    config.get("num_logits_to_keep")  # which logits other programs return
    bias = hf.flag(config, "attention_bias", False)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    head_dim = hf.head_dim(config)
    hf.supported_only(config, "attn_rotary_emb", int(head_dim * _ROTATED))
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=head_dim,
        partial_rotary=_ROTATED,
    )
    mamba, attention = mamba2_config(config), _attention_layers(config, num_layers)
    return with_mixers(decoder, {i: mamba for i in range(num_layers) if i not in attention})


def _attention_layers(config: Mapping[str, Any], num_layers: int) -> set[int]:
    """The layers with attention."""
    listed, known = config.get("attn_layer_indices") or [], range(num_layers)
    fits = isinstance(listed, list | tuple) and len(listed) <= num_layers
    if not fits or not all(type(one) is int and one in known for one in listed):
        raise ConfigError(
            f"config key 'attn_layer_indices' must be a list of layers below {num_layers}, got "
            f"{short(listed)}"
        )
    return {*listed}


FAMILY = ModelFamily(
    name="bamba",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("input_layernorm", "pre_ff_layernorm")),
        names=_NAMES,
        mixers=mamba2_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
