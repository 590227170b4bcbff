"""The spec of a mixture of attention heads; its module is in ``nn.mixers.routed``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, kv_part
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState, keys_and_values

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class RoutedAttentionConfig(BlockSpec):
    """A mixture of attention heads (JetMoE: Shen et al. 2024, arXiv:2404.07413).

    Each of ``count`` experts has a query for every KV head, and a projection of their outputs. A
    token attends with the queries of the ``chosen`` experts with the highest logits; a softmax over
    these weights their outputs. Keys and values are those of all experts.
    """

    count: int
    chosen: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    page_dtype: jnp.dtype | None = None

    @property
    def num_heads(self) -> int:
        """The query heads of a token."""
        return self.chosen * self.num_kv_heads

    @property
    def inner(self) -> int:
        """The width of one expert's queries, of all keys, and of all values."""
        return self.num_kv_heads * self.head_dim

    def for_context(self, length: int) -> RoutedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, rope=self.rope and self.rope.for_context(length))

    def share(self, devices: int) -> RoutedAttentionConfig:
        """See ``MixerSpec``; a device has some heads of every expert."""
        return replace(self, num_kv_heads=kv_part(self.num_kv_heads, devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return keys_and_values(self.num_kv_heads, self.head_dim, self.page_dtype or dtype)

    def with_pages(self, dtype: jnp.dtype) -> RoutedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.head_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return (
            f"{self.chosen} of {self.count} experts of {self.num_kv_heads} query heads and as many "
            f"kv heads of {self.head_dim}"
        )

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.routed").RoutedAttention(self)
