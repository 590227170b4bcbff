"""The spec of latent attention within a window; ``nn.mixers.windowed_latent`` has its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class WindowedLatentConfig(LatentAttentionConfig):
    """Latent attention to the last ``window`` tokens, the current one included (dots3-note).

    Without ``selects`` no context of an engine is longer than the window.
    """

    is_invariant: ClassVar[bool] = False
    indexer: ClassVar[None] = None
    window: int
    selects: bool = True

    @property
    def most_tokens(self) -> int:
        """The most tokens to which a token attends."""
        return self.window

    def for_context(self, length: int) -> Self:
        """See ``MixerSpec``."""
        rope = self.rope and self.rope.for_context(length)
        return replace(self, rope=rope, selects=length > self.window)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        own = super().state(dtype)
        if not self.selects:
            return own
        return replace(own, paged=tuple(replace(one, window=self.window) for one in own.paged))

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        if not self.selects:
            return super().workspace(params, step)
        return import_module("jaxinfer.nn.mixers.bounds").indexed_latent_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{super().words()}, a window of {self.window}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.windowed_latent").WindowedLatentAttention(self)
