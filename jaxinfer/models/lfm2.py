"""LFM2 (dense and mixtures): gated short convolutions, and attention in some layers.

Source: ``modeling_lfm2`` and ``modeling_lfm2_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gated_conv import conv_mixer, conv_param_specs
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, FeedForwardSpec
from pallas_kernels.route.routing import Routing

_CONV, _FULL = "conv", "full_attention"
# transformers' defaults
_THETA, _EPS, _TAPS, _MULTIPLE, _NUM_DENSE = 1e6, 1e-5, 3, 256, 2

_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    o="self_attn.out_proj",
    into=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
)
_EXPERTS = ExpertTensors(
    router="feed_forward.gate",
    gate="feed_forward.experts.{}.w1",
    up="feed_forward.experts.{}.w3",
    down="feed_forward.experts.{}.w2",
    choice_bias="feed_forward.expert_bias",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    # names of older files
    if config.get("tie_embedding") is not None:
        config = hf.with_values(config, {"tie_word_embeddings": config["tie_embedding"]})
    if config.get("num_heads") is not None:
        hf.supported_only(config, "num_heads", config.get("num_attention_heads"))
    eps = hf.positive_float(config, "norm_eps", _EPS)
    hf.supported_only(config, "block_norm_eps", eps)
    if config.get("rope_theta") is not None:
        hf.supported_only(config, "theta", config.get("rope_theta"))
    hf.supported_only(config, "block_use_swiglu", True)
    hf.supported_only(config, "use_pos_enc", True)
    for unused in ("block_mlp_init_scale", "block_out_init_scale"):
        config.get(unused)  # of training
    kinds = _layer_kinds(config)
    is_sparse = "Lfm2MoeForCausalLM" in config.get("architectures", ())
    networks = _networks(config, len(kinds)) if is_sparse else [_dense(config)] * len(kinds)
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * len(kinds),
        qk_norm="head",
        theta=_THETA,
        norm_eps=eps,
        tied=True,
        ffns=networks,
    )
    width = decoder.hidden_size
    for key in ("conv_dim", "conv_dim_out", "block_dim"):  # of older files
        hf.supported_only(config, key, width)
    conv = conv_mixer(config, width, _TAPS)
    return with_mixers(decoder, {i: conv for i, kind in enumerate(kinds) if kind == _CONV})


def _layer_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer; of older files the list has those with attention."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (_CONV, _FULL))
    listed, known = config.get("full_attn_idxs"), range(num_layers)
    if kinds is not None:
        return kinds
    if listed is None:
        return [_FULL] * num_layers
    fits = isinstance(listed, list | tuple) and len(listed) <= num_layers
    if not fits or not all(type(one) is int and one in known for one in listed):
        raise ConfigError(
            f"config key 'full_attn_idxs' must be a list of layers below {num_layers}, got "
            f"{short(listed)}"
        )
    return [_FULL if i in listed else _CONV for i in known]


def _dense(config: Mapping[str, Any]) -> FeedForwardConfig:
    """The network of a dense model, whose width is adjusted as in the original Llama."""
    key = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    width = hf.positive_int(config, key)
    config.get("intermediate_size")
    multiple = hf.positive_int(config, "block_multiple_of", _MULTIPLE)
    factor = hf.positive_float(config, "block_ffn_dim_multiplier", 1.0)
    if hf.flag(config, "block_auto_adjust_ff_dim", True):
        width = int(factor * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return FeedForwardConfig(width=width, activation="silu", gated=True)


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer of a mixture; the first ones are dense."""
    num_dense = hf.layer_index(config, "num_dense_layers", _NUM_DENSE)
    width = hf.positive_int(config, "intermediate_size")
    dense = FeedForwardConfig(width=width, activation="silu", gated=True)
    routing = Routing(
        experts_per_token(config),
        scores="sigmoid",
        renormalised=hf.flag(config, "norm_topk_prob", True),
        scale=hf.positive_float(config, "routed_scaling_factor", 1.0),
    )
    experts = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=routing,
        choice_bias=hf.flag(config, "use_expert_bias", True),
    )
    return [dense if i < num_dense else experts for i in range(num_layers)]


FAMILY = ModelFamily(
    name="lfm2",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("operator_norm", "ffn_norm")),
        names=_NAMES,
        experts=partial(expert_specs, names=_EXPERTS),
        mixers=conv_param_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
