"""Decoders in the form of GPT-2: LayerNorms, networks without gates, and no rotation of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import gqa_config
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.rope import RopeConfig

_BASE = 10000.0  # of a rope that no layer has


def plain_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    sizes: Mapping[str, int],
    num_layers: int,
    activation: str,
    norm_eps: float,
    bias: bool = True,
    **more: Any,
) -> DecoderSpec:
    """A decoder of so many equal layers; ``sizes`` are values of common keys, read from a family's
    own, ``bias`` is that of all matrices, and ``more`` replaces arguments of ``gqa_config``.
    """
    config = hf.with_values(config, sizes)
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    own = {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "windows": (None,) * num_layers,
        "norm": "layer",
        "tied": True,
    }
    return gqa_config(
        config,
        dtype,
        rope=RopeConfig(width // heads, _BASE),
        rotates=(False,) * num_layers,
        gated=False,
        activation=activation,
        norm_eps=norm_eps,
        **(own | more),
    )
