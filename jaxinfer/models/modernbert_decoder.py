"""ModernBERT's decoders (Ettin): LayerNorms, windows in two of three layers, and a network before
the head. The first layer has no norm before its attention, as embeddings have one.

Source: ``modeling_modernbert_decoder`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs, outer_norm
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_EPS, _EVERY, _LOCAL = 1e-5, 3, 128
_THETA, _LOCAL_THETA = 160_000.0, 10_000.0
_UNUSED = (  # of training, of the encoders, and of other programs
    *("classifier_dropout", "deterministic_flash_attn", "embedding_dropout", "layer_norm_eps"),
    *("mlp_dropout", "position_embedding_type", "sparse_prediction", "sparse_pred_ignore_index"),
)
_NORMS = NormSources(("attn_norm", "mlp_norm"))
_NAMES = TensorNames(
    embed="model.embeddings.tok_embeddings",
    embed_norm="model.embeddings.norm",
    final_norm="model.final_norm",
    head="decoder",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.Wo",
    into=("mlp.Wi",),
    down="mlp.Wo",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _UNUSED:
        config.get(key)
    hf.supported_only(config, "classifier_bias", False)
    heads = hf.positive_int(config, "num_attention_heads")
    head_dim = hf.positive_int(config, "hidden_size") // heads
    rope, local = ropes_by_kind(
        hf.with_values(config, {"rope_theta": config.get("global_rope_theta")}),
        head_dim,
        theta=_THETA,
        local_theta=_LOCAL_THETA,
        local_key="local_rope_theta",
    )
    bias = hf.flag(config, "attention_bias", False)
    decoder = gqa_config(
        hf.with_values(config, {"num_key_value_heads": heads}),
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        head_dim=head_dim,
        windows=_windows(config),
        rope=rope,
        local_rope=local,
        activation=hf.activation(config, "hidden_activation", "gelu"),
        norm="layer" if hf.flag(config, "norm_bias", False) else "layer_weight",
        norm_eps=hf.positive_float(config, "norm_eps", _EPS),
        tied=True,
        embed_norm=True,
        head_bias=hf.flag(config, "decoder_bias", True),
        head_activation=hf.activation(config, "classifier_activation", "gelu"),
    )
    first, *others = decoder.layers
    return replace(decoder, layers=(replace(first, norms="ffn"), *others))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer, half of the encoders' one; every third layer has none."""
    half = max(hf.positive_int(config, "local_attention", _LOCAL) // 2, 1)
    window = hf.positive_int(config, "sliding_window", half)  # as transformers saves it
    every = hf.positive_int(config, "global_attn_every_n_layers", _EVERY)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if i % every else None for i in range(num_layers))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with those of the network before the head; the first layer has one norm."""
    d, specs = config.hidden_size, gqa_param_specs(config, norms=_NORMS, names=_NAMES)
    dense = (Source("lm_head.dense.weight", (d, d)),)
    return (
        *(_one_norm(spec) if spec.path == "layers_0/norms" else spec for spec in specs),
        ParamSpec("head_in", ArraySpec((d, d), (None, None)), dense, transposed),
        *outer_norm("head_norm", "lm_head.norm", config, _NORMS),
    )


def _one_norm(spec: ParamSpec) -> ParamSpec:
    """The parameter of a layer's norms with the second one alone."""
    sources = spec.sources[len(spec.sources) // 2 :]
    array = next(iter(spec.leaves.values()))
    own = ArraySpec((len(sources), *array.shape[1:]), array.axes, array.dtype)
    return replace(spec, sources=sources, arrays=own)


FAMILY = ModelFamily(
    name="modernbert_decoder",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"decoder\.weight",),
)
