"""The spec of a gated linear recurrence (RG-LRU); its module is in ``nn.mixers.rg_lru``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class RgLruConfig(MixerSpec):
    """The recurrent block of Griffin (De et al. 2024, arXiv:2402.19427).

    Channels after a causal convolution over ``conv_width`` tokens, in ``heads`` groups of
    ``head_dim``, have a state of one number each, whose decay and whose input depend on the token.
    Their outputs are multiplied by ``activation`` of a projection of the token.
    """

    heads: int
    head_dim: int
    conv_width: int
    activation: str

    @property
    def inner(self) -> int:
        """The number of channels."""
        return self.heads * self.head_dim

    def share(self, devices: int) -> RgLruConfig:
        """See ``MixerSpec``."""
        return replace(self, heads=part(self.heads, devices, "groups of channels"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the channels' states, and the last inputs of the convolution.

        The input at position p is at place p % conv_width, so that a token replaces one place.
        """
        return LayerState(
            per_slot=(
                Entry("lru", (self.inner,), jnp.dtype(jnp.float32), ("heads",)),
                Entry("conv", (self.conv_width, self.inner), dtype, (None, "heads")),
            ),
            align=CHUNK,
        )

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (1, self.inner)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"RG-LRU, {self.inner} channels"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").rg_lru_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.rg_lru").RgLru(self)
