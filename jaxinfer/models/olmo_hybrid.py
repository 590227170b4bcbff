"""OLMo Hybrid: the gated delta rule, and in some layers OLMo 3's attention.

Source: ``modeling_olmo_hybrid`` of Hugging Face transformers. Layers with attention have norms
after their blocks, the others before them. A null ``rope_theta`` means no rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import separate_delta_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hybrid import DELTA, FULL
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.mixers.delta_spec import DeltaConfig

_NORM_EPS = 1e-5  # of the delta rule's outputs; no key says it


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    for unused in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"):
        config.get(unused)  # of training
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (DELTA, FULL))
    if kinds is None:
        kinds = [FULL if i % 4 == 3 else DELTA for i in range(num_layers)]
        kinds[-1] = kinds[-1] if FULL in kinds else FULL
    rope = config.get("rope_parameters")
    rotates = not isinstance(rope, Mapping) or rope.get("rope_theta", 0.0) is not None
    bias = hf.flag(config, "attention_bias", False)
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all_heads",
        norms="after",
        rotates=[rotates] * num_layers,
    )
    layers, delta = list(decoder.layers), _delta(config)
    for i, kind in enumerate(kinds):
        if kind == DELTA:
            layers[i] = replace(layers[i], mixer=delta, norms="before")
    return replace(decoder, layers=tuple(layers))


def _delta(config: Mapping[str, Any]) -> DeltaConfig:
    """The mixer with the delta rule, whose sizes follow those of attention."""
    attention_heads = hf.positive_int(config, "num_attention_heads")
    heads = hf.positive_int(config, "linear_num_key_heads", attention_heads)
    values = hf.positive_int(config, "linear_num_value_heads", attention_heads)
    if values % heads:
        raise ConfigError(
            f"config key 'linear_num_value_heads' {values} is not a multiple of "
            f"'linear_num_key_heads' {heads}"
        )
    width = hf.positive_int(config, "hidden_size")
    key_dim = hf.positive_int(config, "linear_key_head_dim", max(1, int(0.75 * width / heads)))
    return DeltaConfig(
        num_k_heads=heads,
        num_v_heads=values,
        k_dim=key_dim,
        v_dim=hf.positive_int(config, "linear_value_head_dim", 2 * key_dim),
        conv_width=hf.positive_int(config, "linear_conv_kernel_dim", 4),
        norm_eps=_NORM_EPS,
        beta_scale=2.0 if hf.flag(config, "linear_allow_neg_eigval", True) else 1.0,
    )


FAMILY = ModelFamily(
    name="olmo_hybrid",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(
            ("attention_layer_norm", "feedforward_layer_norm"),
            after=("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        mixers=separate_delta_specs,
    ),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"mtp\..*"),
    # as transformers saves layers with attention
    other_names=(("feedforward_layer_norm", "post_attention_layernorm"),),
)
