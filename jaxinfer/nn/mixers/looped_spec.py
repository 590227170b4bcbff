"""The spec of attention in a later pass through a decoder's layers; its module is in
``nn.mixers.looped``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class LoopedAttentionConfig(BlockSpec):
    """Attention to the keys and values of layer ``of``, and to its own in a ``window``
    (IQuest-LoopCoder).

    A gate of each head, made of the token's query, mixes both outputs. ``attention`` is that of
    layer ``of``, with rope and without a norm of heads; the weights are those of that layer, too
    (``LayerSpec.weights_of``).
    """

    attention: AttentionConfig
    of: int
    window: int

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> LoopedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> LoopedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        own = replace(self.attention, window=self.window).state(dtype)
        return replace(own, reads=self.of)

    def with_pages(self, dtype: jnp.dtype) -> LoopedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.with_pages(dtype))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: that of one attention, and both outputs, rotated queries and their
        gates in float32.
        """
        heads = self.attention.num_heads * self.attention.head_dim
        return self.attention.workspace(params, step) + 4 * 4 * step.x.shape[0] * heads

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, next to those of layer {self.of}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.looped").LoopedAttention(self)
