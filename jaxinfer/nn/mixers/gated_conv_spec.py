"""The spec of a gated short convolution; its module is in ``nn.mixers.gated_conv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.state import Entry, LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class GatedConvConfig(MixerSpec):
    """A convolution between two gates, as in LFM2 (``modeling_lfm2`` of transformers).

    A token's projection is b, c and x of ``width`` channels each. b x passes a causal convolution
    of single channels over ``conv_width`` tokens, and is multiplied by c. With ``bias`` both
    projections and the convolution have one.
    """

    width: int
    conv_width: int
    bias: bool = False

    def share(self, devices: int) -> GatedConvConfig:
        """See ``MixerSpec``."""
        return replace(self, width=part(self.width, devices, "channels of a convolution"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the last inputs; that at position p is at place p % conv_width."""
        inputs = (self.conv_width, self.width)
        return LayerState(per_slot=(Entry("conv", inputs, dtype, (None, "heads")),))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (1, self.width)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"a gated convolution of {self.conv_width} tokens and {self.width} channels"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").gated_conv_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.gated_conv").GatedConv(self)
