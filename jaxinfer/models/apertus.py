"""Apertus: norms of heads, and a network without a gate whose activation has parameters (xIELU).

Source: ``modeling_apertus`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import with_rope
from jaxinfer.models.names import PLAIN
from jaxinfer.models.params import ParamSpec, join_flat
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig

# transformers' defaults
_THETA, _XIELU = 12e6, "xielu"
_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": _THETA,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
)
_NORMS = NormSources(names=("attention_layernorm", "feedforward_layernorm"))
_ACTIVATION = (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_bias", False)
    hf.supported_only(config, "qk_norm", True)
    hf.supported_only(config, "post_norm", False)
    # of 1.5, whose head may lack rows
    hf.supported_only(config, "output_vocab_size", hf.positive_int(config, "vocab_size"))
    bias = hf.flag(config, "attention_bias", False)
    is_xielu = config.get("hidden_act") in (None, _XIELU)
    return gqa_config(
        with_rope(config, _ROPE),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        theta=_THETA,
        gated=False,
        activation=_XIELU if is_xielu else hf.activation(config, "hidden_act", _XIELU),
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The shared parameters, and those of each layer's activation, if it has some."""
    return (*gqa_param_specs(config, norms=_NORMS, names=PLAIN), *_activations(config))


def _activations(config: DecoderSpec) -> Iterator[ParamSpec]:
    array = ArraySpec((4,), (None,))
    for i, layer in enumerate(config.layers):
        assert isinstance(layer.ffn, FeedForwardConfig)
        if layer.ffn.activation != _XIELU:
            continue
        start = f"model.layers.{i}.mlp.act_fn."
        sources = tuple(Source(start + name, shape) for name, shape in _ACTIVATION)
        yield ParamSpec(f"layers_{i}/act_params", array, sources, join_flat)


FAMILY = ModelFamily(
    name="apertus",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.(vision|audio)_tokenizer\..*",  # of 1.5
    ),
)
