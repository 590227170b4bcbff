"""OPT: LayerNorm, learned positions, biases, and a network without a gate.

The 350M model has narrower embeddings, and norms of the stream after each block. Such a norm is the
one before the next block, which adds its output to it; that of the last network is the final one.

Source: ``modeling_opt`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily, layer_of
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.plain import plain_config
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.layer_spec import BlockFactors

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
    project=("model.decoder.project_in", "model.decoder.project_out"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    before = hf.flag(config, "do_layer_norm_before", True)
    removed = (False,) if before else (False, True)  # there is none to remove
    hf.supported_only(config, "_remove_final_layer_norm", *removed)
    affine = hf.flag(config, "layer_norm_elementwise_affine", True)
    width = hf.positive_int(config, "hidden_size")
    narrow = hf.positive_int(config, "word_embed_proj_dim", width)
    decoder = plain_config(
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
        embed_width=None if narrow == width else narrow,
    )
    if before:
        return decoder
    layers = [replace(layer, on_norms=(BlockFactors(),) * 2) for layer in decoder.layers]
    layers[0] = replace(layers[0], norms="ffn")
    return replace(decoder, layers=tuple(layers))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; with norms after blocks a layer has the last norm of the one before it."""
    if config.layers[0].on_norms is None:
        return gqa_param_specs(config, norms=_NORMS, names=_NAMES)
    last = f"{_NAMES.layer.format(len(config.layers) - 1)}final_layer_norm"
    names, norms = _NAMES._replace(final_norm=last), NormSources(names=_NORMS.names[::-1])
    return tuple(
        _of_norms(spec, config) if spec.path.endswith("/norms") else spec
        for spec in gqa_param_specs(config, norms=norms, names=names)
    )


def _of_norms(spec: ParamSpec, config: DecoderSpec) -> ParamSpec:
    """A layer's two norms, of which the first is the layer before's, if there is one."""
    layer = layer_of(spec.path.partition("/")[0])
    assert layer is not None
    half = len(spec.sources) // 2
    first, second = spec.sources[:half], spec.sources[half:]
    before, own = (_NAMES.layer.format(i) for i in (layer - 1, layer))
    first = tuple(s._replace(name=s.name.replace(own, before)) for s in first) if layer else ()
    sources = (*first, *second)
    array = ArraySpec((len(sources), config.hidden_size), (None, None), config.norm_dtype)
    return replace(spec, sources=sources, arrays=array)


FAMILY = ModelFamily(
    name="opt",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"lm_head\.weight",),
)
