"""TeleChat2 (China Telecom): Llama's decoder with keys and values of a head in one tensor, and
biases of the projections back to the stream.

Source: the published ``modeling_telechat2.py``; transformers has no class of it. Its base of rope
grows with the length of the sequence beyond ``training_seqlen``, where this ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import PackedHeads, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec

_THETA, _EPS, _LENGTH = 10000.0, 1e-5, 8192  # the published code's
_KEYS_VALUES = "self_attention.key_value"
_NAMES = TensorNames(
    embed="transformer.word_embeddings",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    qkv=("self_attention.query", _KEYS_VALUES, _KEYS_VALUES),
    o="self_attention.dense",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "apply_residual_connection_post_layernorm", False)
    for unused in ("logn", "max_position_embeddings"):
        config.get(unused)  # of no effect, and another name of "training_seqlen"
    given = {
        common: hf.positive_int(config, hf.first_of(config, own, common))
        for common, own in (
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "ffn_hidden_size"),
        )
    }
    own = hf.with_values(config, given)
    head_dim = hf.positive_int(own, "hidden_size") // given["num_attention_heads"]
    length = hf.positive_int(
        config, hf.first_of(config, "training_seqlen", "max_position_embeddings"), _LENGTH
    )
    theta = hf.positive_float(config, "rope_theta", _THETA)
    own = hf.with_values(
        own,
        {
            "max_position_embeddings": length,
            "rope_theta": theta * _growth(config, length, head_dim),
        },
    )
    eps = hf.first_of(config, "layer_norm_epsilon", "rms_norm_eps")
    return gqa_config(
        own,
        dtype,
        o_bias=True,
        mlp_bias="down",
        head_dim=head_dim,
        norm_eps=hf.positive_float(config, eps, _EPS),
    )


def _growth(config: Mapping[str, Any], length: int, head_dim: int) -> float:
    """The factor of rope's base for sequences of up to ``length`` tokens (NTK-aware scaling)."""
    base = hf.positive_int(config, "base_seqlen", length)
    alpha = 2 ** math.ceil(math.log2(length / base) + 1) - 1
    if alpha <= 1:
        return 1.0
    if head_dim <= 2:
        raise ConfigError(
            f"config key 'base_seqlen' is {base}, which gives heads of {head_dim} components no "
            "finite base of rope; correct it"
        )
    return alpha ** (head_dim / (head_dim - 2))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, of which keys and values have one tensor: of each head its key, its value."""
    return tuple(
        _joined(spec, config, int(spec.path.split("/")[0].removeprefix("layers_")))
        if spec.path.endswith("/qkv")
        else spec
        for spec in gqa_param_specs(config, names=_NAMES)
    )


def _joined(spec: ParamSpec, config: DecoderSpec, layer: int) -> ParamSpec:
    """A layer's projection to queries, keys and values, with one source for the last two."""
    mixer, (queries, keys, _) = config.layers[layer].mixer, spec.sources
    assert isinstance(mixer, AttentionConfig), "all layers have attention"
    rows, inputs = keys.shape
    heads = PackedHeads(mixer.num_kv_heads, (mixer.head_dim, mixer.head_dim))
    return replace(spec, sources=(queries, Source(keys.name, (2 * rows, inputs), rows=heads)))


FAMILY = ModelFamily(
    name="telechat2",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",
        r"lm_head\.weight",
    ),
)
