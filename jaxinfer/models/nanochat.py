"""nanochat: RMS norms without weights, also of embeddings and of rotated heads; squared ReLUs.

Source: ``modeling_nanochat`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_CAP, _EPS = 15.0, 1e-6  # transformers' defaults
_NAMES = TensorNames(into=("mlp.fc1",), down="mlp.fc2")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    cap = config.get("final_logit_softcapping", _CAP)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="rotated_plain",
        rope=replace(rope_config(config, hf.head_dim(config)), backwards=True),
        gated=False,
        activation=hf.activation(config, "hidden_act", "relu2"),
        norm="rms_plain",
        norm_eps=hf.positive_float(config, "rms_norm_eps", _EPS),
        embed_norm=True,
        logit_cap=None
        if cap is None
        else hf.positive_float(config, "final_logit_softcapping", cap),
    )


FAMILY = ModelFamily(
    name="nanochat",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
