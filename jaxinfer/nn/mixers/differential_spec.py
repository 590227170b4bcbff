"""The spec of differential attention; its module is in ``nn.mixers.differential``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, part
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState, keys_and_values

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class DifferentialConfig(BlockSpec):
    """Differential attention (Ye et al. 2024, arXiv:2410.05258).

    Heads are in pairs with their own queries and keys. A pair's output is that of its first head
    minus lambda times that of its second, both over the values of both, after an RMS norm with
    epsilon ``norm_eps`` times 1 - ``first``. Lambda is ``first`` and a function of parameters.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    first: float
    norm_eps: float
    bias: bool = False
    page_dtype: jnp.dtype | None = None

    @property
    def inner(self) -> int:
        """The width of all heads' queries, and of all outputs."""
        return self.num_heads * self.head_dim

    def for_context(self, length: int) -> DifferentialConfig:
        """See ``MixerSpec``."""
        return replace(self, rope=self.rope and self.rope.for_context(length))

    def share(self, devices: int) -> DifferentialConfig:
        """See ``MixerSpec``; pairs stay together."""
        pairs = part(self.num_kv_heads // 2, devices, "pairs of kv heads")
        heads = part(self.num_heads, devices, "query heads")
        return replace(self, num_heads=heads, num_kv_heads=2 * pairs)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``; each key is stored with each value of its pair."""
        return keys_and_values(2 * self.num_kv_heads, self.head_dim, self.page_dtype or dtype)

    def with_pages(self, dtype: jnp.dtype) -> DifferentialConfig:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads // 2, 2 * self.head_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        pairs, values = self.num_heads // 2, self.num_kv_heads // 2
        return f"{pairs} pairs of query heads and {values} of kv heads of {self.head_dim}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.differential").Differential(self)
