"""Solar Pro (Upstage): Llama's decoder, whose stream is averaged with copies from earlier layers.

Source: vLLM's ``solar.py``; transformers has no class of it. Solar 10.7B is of Llama's family,
Solar Open has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.skips_spec import SkipsEndConfig, SkipsResidual

# the keys of the layers before which each copy is kept, and before which it is averaged
_KEEPS, _READS = ("bskcn_1", "bskcn_2"), ("bskcn_3", "bskcn_4")
_SHARES = "bskcn_tv"  # the weights of copies while the model is trained, and else


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    names = ("attention_bias", "bias")
    bias = any([hf.flag(config, name, False) for name in names])
    hf.supported_only(config, "hidden_act", "silu")
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=hf.head_dim(config),
        windows=windows_by_layer(config, sliding_window(config, None)),
        logit_scale=hf.positive_float(config, "logit_scale", 1.0),
        residual=SkipsResidual(len(_KEEPS)),
    )
    ends = _ends(config, len(decoder.layers))
    layers = (replace(one, end=ends.get(i)) for i, one in enumerate(decoder.layers))
    return replace(decoder, layers=tuple(layers))


def _ends(config: Mapping[str, Any], num_layers: int) -> dict[int, SkipsEndConfig]:
    """The ends of layers after which a copy is kept or averaged with the stream."""
    keeps = [_layers(config, key, num_layers) for key in _KEEPS]
    reads = [_layers(config, key, num_layers) for key in _READS]
    for i, (kept, read) in enumerate(zip(keeps, reads, strict=True)):
        if read and min(kept, default=num_layers) > min(read):
            raise ConfigError(
                f"config key {_READS[i]!r} has layer {min(read)}, and {_KEEPS[i]!r} none up to it; "
                "correct it"
            )
    share, ends = _share(config), dict[int, SkipsEndConfig]()
    for layer in set.union(*keeps, *reads):
        own, read = (
            tuple(i for i, listed in enumerate(lists) if layer in listed)
            for lists in (keeps, reads)
        )
        ends[layer - 1] = SkipsEndConfig(count=len(keeps), keeps=own, reads=read, share=share)
    return ends


def _layers(config: Mapping[str, Any], key: str, num_layers: int) -> set[int]:
    """The layers that a key lists."""
    given = config.get(key)
    known = range(1, num_layers)
    if not isinstance(given, list) or not all(type(one) is int and one in known for one in given):
        raise ConfigError(
            f"config key {key!r} must be a list of layers from 1 to {num_layers - 1}, got "
            f"{short(given)}"
        )
    return {*given}


def _share(config: Mapping[str, Any]) -> float:
    """The weight of a copy of the stream."""
    given: Any = config.get(_SHARES)
    fits = isinstance(given, list) and len(given) == 2 and all(map(hf.is_positive, given))
    if not fits or given[1] > 1:
        raise ConfigError(
            f"config key {_SHARES!r} must hold two numbers from 0 to 1, got {short(given)}"
        )
    return float(given[1])


FAMILY = ModelFamily(
    name="solar",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
