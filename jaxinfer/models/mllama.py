"""Llama 3.2 Vision's text decoder: Llama, of which layers that attend to images do nothing here.

Source: ``modeling_mllama`` of Hugging Face transformers. The embedding has eight rows more than the
vocabulary, for images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import Source
from jaxinfer.nn.absent import NoMixer, NoNetwork
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_THETA, _ACROSS = 5e5, (3, 8, 13, 18, 23, 28, 33, 38)
_ROWS_OF_IMAGES = 8


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    head_dim = hf.positive_int(config, "hidden_size") // hf.positive_int(
        config, "num_attention_heads"
    )
    decoder = gqa_config(config, dtype, head_dim=head_dim, theta=_THETA)
    layers = list(decoder.layers)
    for i in _layers_of_images(config, len(layers)):
        layers[i] = replace(layers[i], mixer=NoMixer(), ffn=NoNetwork())
    return replace(decoder, layers=tuple(layers))


def _layers_of_images(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The numbers of the layers that attend to images alone."""
    given = config.get("cross_attention_layers")
    if given is None:
        return [i for i in _ACROSS if i < num_layers]
    listed = given if isinstance(given, list) else [-1]
    if not all(type(one) is int and one >= 0 for one in listed) or len(listed) > num_layers:
        raise ConfigError(
            "config key 'cross_attention_layers' must be a list of numbers of layers, got "
            f"{short(given)}"
        )
    return [i for i in listed if i < num_layers]


def without_images(embedding: np.ndarray) -> np.ndarray:  # [V + 8, D] -> [V, D]
    """The rows of tokens of text."""
    return embedding[:-_ROWS_OF_IMAGES]


def _with_images(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    del sources
    return [np.pad(array, ((0, _ROWS_OF_IMAGES), (0, 0)))]


without_images.inverse = _with_images


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """Llama's parameters; layers that attend to images have none."""
    first, *others = gqa_param_specs(config)
    (rows,) = first.sources
    source = rows._replace(shape=(config.vocab_size + _ROWS_OF_IMAGES, config.hidden_size))
    return replace(first, sources=(source,), build=without_images, matrix=None), *others


FAMILY = ModelFamily(
    name="mllama",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.layers\.\d+\.(cross_attn(_\w+)?|mlp|input_layernorm|post_attention_layernorm)[._].*",
    ),
    optional_prefix="language_model.",
)
