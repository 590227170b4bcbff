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
from jaxinfer.models.params import ParamSpec, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_THETA = 12e6
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
_ALPHAS = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "xielu")
    hf.supported_only(config, "mlp_bias", False)
    hf.supported_only(config, "qk_norm", True)
    hf.supported_only(config, "post_norm", False)
    # of 1.5, whose head may lack rows
    hf.supported_only(config, "output_vocab_size", hf.positive_int(config, "vocab_size"))
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        with_rope(config, _ROPE),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        theta=_THETA,
        gated=False,
        activation="xielu",
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The shared parameters, and those of each layer's activation."""
    return (*gqa_param_specs(config, norms=_NORMS, names=PLAIN), *_alphas(len(config.layers)))


def _alphas(num_layers: int) -> Iterator[ParamSpec]:
    array = ArraySpec((2,), (None,))
    for i in range(num_layers):
        sources = tuple(Source(f"model.layers.{i}.{name}", (1,)) for name in _ALPHAS)
        yield ParamSpec(f"layers_{i}/act_alphas", array, sources, join)


FAMILY = ModelFamily(
    name="apertus",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.(vision|audio)_tokenizer\..*",  # of 1.5
        r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)",
    ),
)
