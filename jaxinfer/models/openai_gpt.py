"""OpenAI GPT (GPT-1): GPT-2's parameters, with norms of the stream after each block.

Source: ``modeling_openai`` of Hugging Face transformers. A norm after a block is the one before the
next block, which adds its output to it; that of the last network is the final one, as in OPT-350M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily, layer_of
from jaxinfer.models.gpt2_parts import gpt2_config, gpt2_param_specs
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.layer_spec import BlockFactors

_ACTIVATIONS = MappingProxyType(
    {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
)
_OUTER = MappingProxyType(
    {"wte.weight": "tokens_embed.weight", "wpe.weight": "positions_embed.weight"}
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    name = config.get("afn") or "gelu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            f"config key 'afn' is {short(name)}; known activations are {', '.join(_ACTIVATIONS)}"
        )
    decoder = gpt2_config(
        hf.with_values(config, {"activation_function": _ACTIVATIONS[name], "n_inner": None}), dtype
    )
    layers = [replace(layer, on_norms=(BlockFactors(),) * 2) for layer in decoder.layers]
    layers[0] = replace(layers[0], norms="ffn")
    return replace(decoder, layers=tuple(layers))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """GPT-2's parameters; a layer has the last norm of the one before it."""
    return tuple(_renamed(spec, config) for spec in gpt2_param_specs(config))


def _renamed(spec: ParamSpec, config: DecoderSpec) -> ParamSpec:
    """The parameter with GPT's tensors."""
    if spec.path == "final_norm":
        last = f"h.{len(config.layers) - 1}.ln_2."
        own = (s._replace(name=s.name.replace("ln_f.", last)) for s in spec.sources)
        return replace(spec, sources=tuple(own))
    if spec.path.endswith("/norms"):
        layer = layer_of(spec.path.partition("/")[0])
        assert layer is not None
        first, second = spec.sources[:2], spec.sources[2:]
        before = (s._replace(name=s.name.replace(f"h.{layer}.", f"h.{layer - 1}.")) for s in second)
        sources = (*before, *first) if layer else first
        array = ArraySpec((len(sources), config.hidden_size), (None, None))
        return replace(spec, sources=sources, arrays=array)
    own = (s._replace(name=_OUTER.get(s.name, s.name)) for s in spec.sources)
    return replace(spec, sources=tuple(own))


FAMILY = ModelFamily(
    name="openai_gpt",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"h\.\d+\.attn\.bias", r"lm_head\.weight", r"position_ids"),
    optional_prefix="transformer.",
)
