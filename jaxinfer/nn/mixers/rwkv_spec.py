"""The specs of RWKV's two blocks; their modules are in ``nn.mixers.rwkv``."""

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

SHIFT = 2  # the tokens of which an input is mixed: a convolution of so many taps


@dataclass(frozen=True, kw_only=True)
class TimeMixConfig(MixerSpec):
    """RWKV-4's linear attention (Peng et al. 2023, arXiv:2305.13048).

    Each of ``inner`` channels has a mean of the values of all tokens so far, weighted by the
    exponentials of their keys, with a decay of its own. Keys, values and gates are projected from
    the token mixed with the one before it, both of ``width`` elements.
    """

    width: int
    inner: int

    def share(self, devices: int) -> TimeMixConfig:
        """See ``MixerSpec``."""
        return replace(self, inner=part(self.inner, devices, "channels of RWKV"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: numerators, denominators and the exponents that both are divided by,
        and the last tokens.
        """
        wkv = Entry("wkv", (self.inner, 3), jnp.dtype(jnp.float32), ("heads", None))
        return LayerState(per_slot=(wkv, _shift(self.width, dtype)), align=CHUNK)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (1, self.inner)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"RWKV, {self.inner} channels"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").rwkv_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.rwkv").TimeMix(self)


@dataclass(frozen=True, kw_only=True)
class ChannelMixConfig(MixerSpec):
    """RWKV-4's network of ``inner`` columns, which reads the token before, too."""

    width: int
    inner: int

    def share(self, devices: int) -> ChannelMixConfig:
        """See ``MixerSpec``."""
        return replace(self, inner=part(self.inner, devices, "columns of a feed-forward network"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the last tokens."""
        return LayerState(per_slot=(_shift(self.width, dtype),), align=CHUNK)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (1, self.inner)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"feed-forward {self.inner}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").rwkv_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.rwkv").ChannelMix(self)


def _shift(width: int, dtype: jnp.dtype) -> Entry:
    """The last tokens: that at position p is at place p % SHIFT."""
    return Entry("conv", (SHIFT, width), dtype, (None, None))
