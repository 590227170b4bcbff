"""DiffLlama: Llama with differential attention.

Source: ``modeling_diffllama`` of Hugging Face transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, stack
from jaxinfer.models.sources import ArraySpec, PackedHeads, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec
from jaxinfer.nn.mixers.differential_spec import DifferentialConfig
from jaxinfer.nn.placement import Fused


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("lambda_std_dev")  # of the first values of parameters
    bias = hf.flag(config, "attention_bias", False)
    eps = hf.positive_float(config, "rms_norm_eps")
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
    )
    mixers = {}
    for i, layer in enumerate(decoder.layers):
        own = layer.mixer
        assert isinstance(own, AttentionConfig)
        if own.num_kv_heads % 2:
            raise ConfigError(
                f"config key 'num_key_value_heads' is {own.num_kv_heads}, and differential "
                "attention has pairs of heads"
            )
        mixers[i] = DifferentialConfig(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            scale=own.scale,
            rope=own.rope,
            first=0.8 - 0.6 * math.exp(-0.3 * i),
            norm_eps=eps,
            bias=bias,
        )
    return with_mixers(decoder, mixers)


def differential_specs(
    path: str, source: str, c: DifferentialConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.differential``.

    The tensors have the first heads of all pairs before the second.
    """
    del norm_dtype
    pairs, queries = c.num_kv_heads // 2, c.inner // c.num_kv_heads
    q, kv = (PackedHeads(2, (rows,) * pairs) for rows in (queries, c.head_dim))
    parts = (c.inner, *(c.num_kv_heads * c.head_dim,) * 2)
    linears = (
        Linear(
            "qkv",
            tuple(f"self_attn.{name}_proj" for name in "qkv"),
            (width, sum(parts)),
            (None, Fused("heads", parts, (pairs,) * 3)),
            c.bias,
            (q, kv, kv),
        ),
        Linear("o", ("self_attn.o_proj",), (c.inner, width), ("heads", None), c.bias),
    )
    for specs in linear_specs(path, source, linears):
        yield from specs
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    lambdas = tuple(Source(f"{source}self_attn.{name}", (c.head_dim,)) for name in names)
    array = ArraySpec((len(names), c.head_dim), (None, None))
    yield ParamSpec(f"{path}lambdas", array, lambdas, stack)


FAMILY = ModelFamily(
    name="diffllama",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, mixers=differential_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
