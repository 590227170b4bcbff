"""Config keys and checkpoint tensors of gated convolutions (LFM2, LFM3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.linears import Linear, conv_specs, linear_specs
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.mixers.gated_conv_spec import GatedConvConfig
from jaxinfer.nn.placement import Fused


def conv_mixer(config: Mapping[str, Any], width: int, taps: int) -> GatedConvConfig:
    """The convolution of so many channels, by default of ``taps`` tokens."""
    return GatedConvConfig(
        width=width,
        conv_width=hf.positive_int(config, "conv_L_cache", taps),
        bias=hf.flag(config, "conv_bias", False),
    )


def conv_param_specs(
    path: str, source: str, c: GatedConvConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.gated_conv``."""
    del norm_dtype
    own, channels = f"{source}conv.", c.width
    axes = (None, Fused("heads", (channels,) * 3))
    linears = (
        Linear("into", ("in_proj",), (width, 3 * channels), axes, c.bias),
        Linear("o", ("out_proj",), (channels, width), ("heads", None), c.bias),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    yield from conv_specs(path, f"{own}conv", (c.conv_width, channels), "heads", bias=c.bias)
