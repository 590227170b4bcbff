"""The members that specs of mixers have in common whose attention is an ``AttentionConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.rope import RopeConfig

if TYPE_CHECKING:
    from jaxinfer.nn.state import LayerState


@dataclass(frozen=True, kw_only=True)
class AroundAttention(BlockSpec):
    """Grouped-query attention whose queries, keys or values are made otherwise; ``attention`` has
    heads, scale, rope and the state.
    """

    attention: AttentionConfig

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> Self:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> Self:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return self.attention.state(dtype)

    def with_pages(self, dtype: jnp.dtype) -> Self:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.with_pages(dtype))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        return self.attention.workspace(params, step)
