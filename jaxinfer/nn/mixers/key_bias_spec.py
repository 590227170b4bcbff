"""The spec of attention whose keys have biases of scores, of which ``key_bias`` is the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState, keys_and_values

if TYPE_CHECKING:
    import flax.linen as nn

_MORE = 16  # components of a stored key for its bias: kernels of CPUs read as many at a time


@dataclass(frozen=True)
class KeyBiasConfig(BlockSpec):
    """Grouped-query attention whose scores have a bias that each key makes of its values (Doge).

    ``attention`` has its other options: an RMS norm of each head before rope. A stored key has a
    component for the bias, by which queries have 1.
    """

    attention: AttentionConfig

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    @property
    def wide(self) -> AttentionConfig:
        """Attention over the keys as they are stored."""
        return replace(self.attention, head_dim=self.attention.head_dim + _MORE)

    def for_context(self, length: int) -> KeyBiasConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        c = self.wide
        return keys_and_values(c.num_kv_heads, c.head_dim, dtype, c.window)

    def with_pages(self, dtype: jnp.dtype) -> None:
        """None: eight bits hold no bias beside a key."""
        del dtype

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        return self.wide.workspace(params, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, with biases of keys"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.key_bias").KeyBiasAttention(self)
