"""IQuest-LoopCoder: Llama's layers, which a token passes twice.

In the second pass a layer attends to its keys of the first one, and in a window to those of the
second. A pass is a part of the decoder's layers here, of which those of the second borrow weights.

Source: ``iquest_loopcoder.py`` of vLLM; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, LayerSpec
from jaxinfer.nn.mixers.looped_spec import LoopedAttentionConfig

_PASSES, _WINDOW = 2, 64


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "loop_num", _PASSES)
    hf.supported_only(config, "hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias"):
        hf.supported_only(config, bias, False)
    heads, _ = hf.head_counts(config)
    hf.supported_only(config, "head_dim", hf.positive_int(config, "hidden_size") // heads)
    if not hf.flag(config, "use_sliding_window", True):
        config.get("sliding_window")  # refused otherwise, as no layer reads it
    window = hf.positive_int(config, "loop_window_size", _WINDOW)
    decoder = gqa_config(config, dtype, activation="silu")
    second = [_second(i, layer, window) for i, layer in enumerate(decoder.layers)]
    return replace(decoder, layers=(*decoder.layers, *second))


def _second(number: int, layer: LayerSpec, window: int) -> LayerSpec:
    """A layer of the second pass."""
    assert isinstance(layer.mixer, AttentionConfig)
    mixer = LoopedAttentionConfig(attention=layer.mixer, of=number, window=window)
    return replace(layer, mixer=mixer, weights_of=number)


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters: those of the first pass, and gates of the second."""
    own = [layer for layer in config.layers if layer.weights_of is None]
    specs = [*gqa_param_specs(replace(config, layers=tuple(own)))]
    for i, layer in enumerate(config.layers):
        if isinstance(mixer := layer.mixer, LoopedAttentionConfig):
            path, source = f"layers_{i}/loop_gate", f"model.gate_projections.{mixer.of}."
            c = mixer.attention
            gate = Source(f"{source}weight", (c.num_heads, c.head_dim))
            specs.append(ParamSpec(path, ArraySpec(gate.shape, ("heads", None)), (gate,), as_is))
            bias = Source(f"{source}bias", (c.num_heads,))
            array = ArraySpec(bias.shape, ("heads",))
            specs.append(ParamSpec(f"{path}_bias", array, (bias,), as_is))
    return tuple(specs)


FAMILY = ModelFamily(
    name="iquest_loop",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
