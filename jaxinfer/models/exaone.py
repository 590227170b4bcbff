"""EXAONE 3 and 3.5: the shared decoder under names of its own.

Source: ``modeling_exaone`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_THETA, _EPS = 500000.0, 1e-5  # transformers' defaults
_NORMS = NormSources(names=("ln_1", "ln_2"))
_NAMES = TensorNames(
    embed="transformer.wte",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    qkv=tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    o="attn.attention.out_proj",
    into=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    layers = hf.positive_int(config, hf.first_of(config, "num_layers", "num_hidden_layers"))
    own = hf.with_values(config, {"num_hidden_layers": layers})
    eps = hf.first_of(config, "layer_norm_epsilon", "rms_norm_eps")
    activation = hf.first_of(config, "activation_function", "hidden_act")
    return gqa_config(
        own,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        windows=windows_by_layer(own, None),
        theta=_THETA,
        activation=hf.activation(config, activation, "silu"),
        norm_eps=hf.positive_float(config, eps, _EPS),
    )


FAMILY = ModelFamily(
    name="exaone",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(
        r"transformer\.h\.\d+\.attn\.attention\.rotary\.inv_freq",
        r"transformer\.rotary\.inv_freq",
        r"lm_head\.weight",
    ),
)
