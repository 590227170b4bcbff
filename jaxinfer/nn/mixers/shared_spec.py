"""The spec of attention to the keys and values of an earlier layer; its module is in
``nn.mixers.shared``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxinfer.nn.decoder_config import AttentionConfig, MixerSpec
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class SharedAttentionConfig(MixerSpec):
    """Grouped-query attention with queries of its own to the keys and values of layer ``of``.

    ``attention`` is what a layer with its own keys and values would have; its heads of keys, its
    rope and its window are those of layer ``of``. Sinks and gates are not supported.
    """

    attention: AttentionConfig
    of: int

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> SharedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> SharedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        del dtype
        return LayerState(of=self.of)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def words(self) -> str:
        """See ``MixerSpec``."""
        heads, head_dim = self.attention.num_heads, self.attention.head_dim
        return f"{heads} query heads of {head_dim} over the keys of layer {self.of}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.shared").SharedAttention(self)
