"""Nemotron-NAS (Llama-Nemotron Super and Ultra) and DeciLM: Llama's layers, of which a search chose
the KV heads and the width of the network of each, or to leave out one of the two.

Source: the published ``modeling_decilm.py`` and ``block_config.py`` (Bercovich et al. 2024,
arXiv:2411.19146).
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
from jaxinfer.nn.absent import NoMixer, NoNetwork
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
)

_BLOCKS, _KV_HEADS = "block_configs", "num_key_value_heads_per_layer"
_OTHERS = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")
_OTHERS += ("mamba", "moe", "llama4")
_MULTIPLE = 256  # to which widths of networks are rounded up


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in ("num_key_value_heads", "intermediate_size"):
        config.get(key)  # null, or that of the model which the search began with
    bias, blocks = hf.flag(config, "attention_bias", False), _blocks(config)
    heads = hf.positive_int(config, "num_attention_heads")
    given = {"num_key_value_heads": heads, "intermediate_size": _MULTIPLE}  # those of each layer
    spec = gqa_config(
        hf.with_values(config, given),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
    )
    if not isinstance(blocks, list | tuple) or len(blocks) != len(spec.layers):
        raise ConfigError(
            f"config key {_BLOCKS!r} is {short(blocks)}; it must be a list of the blocks of each "
            f"of the {len(spec.layers)} layers"
        )
    layers = (
        _layer(layer, block, config) for layer, block in zip(spec.layers, blocks, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _blocks(config: Mapping[str, Any]) -> Any:
    """The blocks of each layer; DeciLM-7B has a list of the KV heads alone."""
    counts = config.get(_KV_HEADS)
    if counts is None:
        return config.get(_BLOCKS)
    heads = hf.positive_int(config, "num_attention_heads")
    if not isinstance(counts, list | tuple) or any(
        not isinstance(count, int) or count < 1 or heads % count for count in counts
    ):
        raise ConfigError(
            f"config key {_KV_HEADS!r} is {short(counts)}; each must be a number that divides "
            f"'num_attention_heads' ({heads})"
        )
    ffn = {"intermediate_size": hf.positive_int(config, "intermediate_size")}
    return [{"attention": {"n_heads_in_group": heads // count}, "ffn": ffn} for count in counts]


def _layer(layer: LayerSpec, block: Any, config: Mapping[str, Any]) -> LayerSpec:
    """The layer with the blocks of one of ``block_configs``."""
    given: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    attention, network = given.get("attention"), given.get("ffn")
    if not isinstance(attention, Mapping) or not isinstance(network, Mapping):
        raise ConfigError(
            f"config key {_BLOCKS!r} has {short(block)}; each must have objects 'attention' and "
            "'ffn'"
        )
    mixer, ffn = _mixer(layer.mixer, attention), _network(layer.ffn, network, config)
    norms = "shared" if mixer.is_absent or ffn.is_absent else layer.norms
    return replace(layer, mixer=mixer, ffn=ffn, norms=norms)


def _mixer(attention: MixerSpec, own: Mapping[str, Any]) -> MixerSpec:
    """The attention of a layer, if it has any."""
    _refuse_others(own)
    if hf.flag(own, "no_op", False):
        return NoMixer()
    assert isinstance(attention, AttentionConfig)
    group = hf.positive_int(own, "n_heads_in_group")
    if attention.num_heads % group:
        raise ConfigError(
            f"config key {_BLOCKS!r}: 'n_heads_in_group' is {group}, and must divide "
            f"'num_attention_heads' ({attention.num_heads})"
        )
    return replace(attention, num_kv_heads=attention.num_heads // group)


def _network(
    network: FeedForwardSpec, own: Mapping[str, Any], config: Mapping[str, Any]
) -> FeedForwardSpec:
    """The network of a layer, if it has one."""
    _refuse_others(own)
    if hf.flag(own, "no_op", False):
        return NoNetwork()
    assert isinstance(network, FeedForwardConfig)
    if own.get("intermediate_size") is not None:
        width = hf.positive_int(own, "intermediate_size")
    else:
        hidden = hf.positive_int(config, "hidden_size")
        width = int(2 * hf.positive_float(own, "ffn_mult") * hidden / 3)
        width += -width % _MULTIPLE
    if own.get("hidden_act") is not None:
        network = replace(network, activation=hf.activation(own, "hidden_act", "silu"))
    return replace(network, width=width)


def _refuse_others(own: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a block in place of attention to all tokens or a gated network."""
    for key in _OTHERS:
        if own.get(key):
            raise ConfigError(
                f"config key {_BLOCKS!r} has {key!r} {short(own[key])}, and this family has "
                "attention to all tokens and gated networks alone; use another model"
            )


FAMILY = ModelFamily(
    name="nemotron_nas",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
