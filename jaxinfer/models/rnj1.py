"""Rnj-1 (Essential AI): Gemma 3's decoder with one rope, and with chunks in place of windows.

A layer of chunks attends to half of ``sliding_window`` tokens, and to as many before these.
transformers has no class of it.

Source: ``rnj1.py`` of vLLM.
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
from jaxinfer.models.gemma_parts import AROUND_BLOCKS
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import SECTIONS, rope_config
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import Chunk

# Gemma 3's defaults in transformers
_HEAD_DIM, _SCALAR, _THETA, _WINDOW = 256, 256, 1e6, 4096
_FULL, _CHUNKED = "full_attention", "chunked_attention"
_CHUNKS = 2  # those within sliding_window


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_activation", "gelu_pytorch_tanh")
    hf.supported_only(config, "use_bidirectional_attention", False)
    for unused in ("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"):
        config.get(unused)  # of Gemma 3's layers with windows
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (_FULL, _CHUNKED))
    if kinds is None:
        raise ConfigError(
            f"config key 'layer_types' is missing; it must hold {_FULL!r} or {_CHUNKED!r} for each "
            f"of the {num_layers} layers"
        )
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    ropes = {kind: _rope(config, kind, head_dim) for kind in sorted({*kinds})}
    chunk = _chunk(config)
    capped = config.get("final_logit_softcapping") is not None
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        rope=ropes.get(_FULL, ropes[kinds[0]]),
        activation="gelu_tanh",
        tied=True,
        scale=hf.positive_float(config, "query_pre_attn_scalar", _SCALAR) ** -0.5,
        norms="both",
        norm_dtype=jnp.dtype(jnp.float32),
        logit_cap=hf.positive_float(config, "final_logit_softcapping") if capped else None,
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
    )
    layers = []
    for kind, layer in zip(kinds, decoder.layers, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        own: dict[str, Any] = {"rope": ropes[kind]}
        if kind == _CHUNKED:
            own["chunk"] = chunk
        layers.append(replace(layer, mixer=replace(layer.mixer, **own)))
    return replace(decoder, layers=tuple(layers))


def _chunk(config: Mapping[str, Any]) -> Chunk:
    """A token sees its own chunk and the one before."""
    window = hf.positive_int(config, "sliding_window", _WINDOW)
    if window < _CHUNKS:
        raise ConfigError(f"config key 'sliding_window' must be at least {_CHUNKS}, got {window}")
    return Chunk(window // _CHUNKS, back=_CHUNKS - 1)


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeConfig:
    """The rope of a kind of layers, which may have a section of its own."""
    own: dict[str, Any] = {}
    for place in SECTIONS:
        section = config.get(place)
        if isinstance(section, Mapping) and any(name in section for name in (_FULL, _CHUNKED)):
            if not isinstance(section.get(kind), Mapping):
                raise ConfigError(
                    f"config key {place!r} has no section for {kind!r}, a kind of 'layer_types'; "
                    "add it"
                )
            own[place] = section[kind]
    return rope_config(hf.with_values(config, own), head_dim, theta=_THETA)


FAMILY = ModelFamily(
    name="rnj1",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=AROUND_BLOCKS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
