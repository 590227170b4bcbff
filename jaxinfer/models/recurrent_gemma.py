"""RecurrentGemma (Griffin): gated linear recurrences, and attention with a window in every third
layer, of which half of each head rotates.

Source: ``modeling_recurrent_gemma`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.linears import Linear, conv_specs, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is, plus_one, stack_flat, stack_plus_one
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.mixers.rg_lru_spec import RgLruConfig
from jaxinfer.nn.placement import Fused

# transformers' defaults; files have no length
_POSITIONS, _WINDOW, _TAPS, _CAP = 8192, 2048, 4, 30.0
_EPS, _PARTIAL_ROTARY = 1e-6, 0.5
_BLOCKS = ("recurrent", "recurrent", "attention")
_FLOAT32 = jnp.dtype(jnp.float32)
_NORMS = NormSources(("temporal_pre_norm", "channel_pre_norm"), plus_one, stack_plus_one)
_NAMES = TensorNames(
    final_norm="model.final_norm",
    qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
    o="temporal_block.o_proj",
    into=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    num_layers = hf.positive_int(config, "num_hidden_layers")
    hf.supported_only(config, "embeddings_scale_by_sqrt_dim", True)
    for key in ("w_init_variance_scale", "final_w_init_variance_scale"):
        config.get(key)
    activation = hf.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    window = hf.positive_int(config, "attention_window_size", _WINDOW)
    own = {
        "max_position_embeddings": hf.positive_int(config, "max_position_embeddings", _POSITIONS),
        "intermediate_size": max(hf.positive_int(config, "intermediate_size") // 2, 1),
    }
    decoder = gqa_config(
        hf.with_values(config, own),
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        o_bias=True,
        mlp_bias=True,
        head_dim=hf.positive_int(config, "head_dim", width // heads),
        windows=(window,) * num_layers,
        partial_rotary=_PARTIAL_ROTARY,
        activation=activation,
        norm_eps=hf.positive_float(config, "rms_norm_eps", _EPS),
        tied=True,
        norm_dtype=_FLOAT32,
        embed_scale=float(jnp.bfloat16(width**0.5)),  # which transformers rounds
        logit_cap=hf.positive_float(config, "logits_soft_cap", _CAP),
    )
    inner = hf.positive_int(config, "lru_width", width)
    if inner % heads:
        raise ConfigError(
            f"config key 'lru_width' {inner} is not a multiple of 'num_attention_heads' {heads}"
        )
    mixer = RgLruConfig(
        heads=heads,
        head_dim=inner // heads,
        conv_width=hf.positive_int(config, "conv1d_width", _TAPS),
        activation=activation,
    )
    blocks = _blocks(config, num_layers)
    return with_mixers(decoder, {i: mixer for i in range(num_layers) if blocks[i] == _BLOCKS[0]})


def _blocks(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """The kind of each layer's mixer: those of ``block_types``, repeated."""
    given = config.get("block_types", _BLOCKS)
    known = isinstance(given, list | tuple) and given and all(one in _BLOCKS for one in given)
    if not known:
        raise ConfigError(
            f"config key 'block_types' is {short(given)}; it must be a list of 'recurrent' and "
            "'attention'"
        )
    return [given[i % len(given)] for i in range(num_layers)]


def _mixer_specs(
    path: str, source: str, c: RgLruConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.rg_lru``."""
    del norm_dtype
    own, inner, gates = f"{source}temporal_block.", c.inner, (c.heads, c.head_dim, c.head_dim)
    both = (None, Fused("heads", (inner, inner), (c.heads, c.heads)))
    linears = (
        Linear("into", ("linear_y", "linear_x"), (width, 2 * inner), both, bias=True),
        Linear("o", ("linear_out",), (inner, width), ("heads", None), bias=True),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    yield from conv_specs(path, f"{own}conv_1d", (c.conv_width, inner), "heads", bias=True)
    for name, tensor in (("input_gate", "input_gate"), ("decay_gate", "recurrent_gate")):
        matrices = (Source(f"{own}rg_lru.{tensor}_weight", gates),)
        # a decay to the power of the tokens is sensitive, so that gates are never quantised
        yield ParamSpec(f"{path}{name}", ArraySpec(gates, ("heads", None, None)), matrices, as_is)
    decay = (
        Source(f"{own}rg_lru.recurrent_param", (inner,)),
        Source(f"{own}rg_lru.input_gate_bias", (c.heads, c.head_dim)),
        Source(f"{own}rg_lru.recurrent_gate_bias", (c.heads, c.head_dim)),
    )
    array = ArraySpec((3, inner), (None, "heads"), _FLOAT32)
    yield ParamSpec(f"{path}decay", array, decay, stack_flat)


FAMILY = ModelFamily(
    name="recurrent_gemma",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES, mixers=_mixer_specs),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.normalizer"),
)
