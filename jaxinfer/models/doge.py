"""Doge: keys with biases of scores, and weights of the stream that blocks add to.

A context of at most "keep_window_size" tokens is supported, in which attention leaves no key out.

Source: ``modeling_doge`` of Hugging Face transformers, whose mixtures mix a prompt's tokens and are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.names import LLAMA
from jaxinfer.models.params import ParamSpec, as_is, stack, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec
from jaxinfer.nn.mixers.key_bias_spec import KeyBiasConfig
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.residual_spec import WeightedResidual

_KEPT = 2048  # transformers' default of keep_window_size
_WEIGHTS = (
    ("mixer_residual", "input_residual"),
    ("ffn_residual", "post_attention_residual"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "is_moe", False)
    for unused in ("num_experts", "num_experts_per_tok", "norm_topk_prob"):
        config.get(unused)
    kept = hf.positive_int(config, "keep_window_size", _KEPT)
    longest = min(kept, hf.positive_int(config, "max_position_embeddings"))
    layers, window = hf.positive_int(config, "num_hidden_layers"), None
    if config.get("sliding_window") is not None:
        window = hf.positive_int(config, "sliding_window")
    bias = hf.flag(config, "attention_bias", False)
    decoder = gqa_config(
        config,
        dtype,
        windows=(window,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlp_bias=hf.flag(config, "mlp_bias", False),
        residual=WeightedResidual(),
    )
    default, most = (min(length, longest) for length in decoder.lengths)
    mixers: dict[int, KeyBiasConfig] = {}
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer.mixer, AttentionConfig)
        mixers[i] = KeyBiasConfig(layer.mixer)
    return replace(with_mixers(decoder, mixers), lengths=(default, most))


def _attention_specs(
    path: str, source: str, c: KeyBiasConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.key_bias``."""
    own, a = f"{source}self_attn.", c.attention
    n, k, h = a.num_heads, a.num_kv_heads, a.head_dim
    axes = (None, Fused("heads", (n * h, k * h, k * h), (n, k, k)))
    linears = (
        Linear("qkv", LLAMA.qkv, (width, (n + 2 * k) * h), axes, a.qkv_bias),
        Linear("o", (LLAMA.o,), (n * h, width), ("heads", None), a.o_bias),
    )
    weights, biases = linear_specs(path, source, linears)
    yield from (*weights, *biases)
    norms = tuple(Source(f"{source}{name}.weight", (h,)) for name in LLAMA.qk_norms)
    yield ParamSpec(f"{path}qk_norms", ArraySpec((2, h), (None, None), norm_dtype), norms, stack)
    made = (Source(f"{own}dt_proj.weight", (k, k * h)),)
    yield ParamSpec(f"{path}key_bias", ArraySpec((k * h, k), (None, None)), made, transposed)
    if a.qkv_bias:
        made = (Source(f"{own}dt_proj.bias", (k,)),)
        yield ParamSpec(f"{path}key_bias_bias", ArraySpec((k,), (None,)), made, as_is)
    rates = (Source(f"{own}A", (k,)),)
    yield ParamSpec(f"{path}rates", ArraySpec((k,), (None,)), rates, as_is)


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the weights of the stream before each block's output is added."""
    specs, array = [*gqa_param_specs(config, mixers=_attention_specs)], (config.hidden_size,)
    for i in range(len(config.layers)):
        for name, tensor in _WEIGHTS:
            source = (Source(LLAMA.layer.format(i) + tensor, array),)
            path = f"layers_{i}/{name}/weight"
            specs.append(ParamSpec(path, ArraySpec(array, (None,)), source, as_is))
    return tuple(specs)


FAMILY = ModelFamily(
    name="doge",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
