"""The spec of attention whose queries have a latent; ``nn.mixers.factored`` has its module."""

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
class FactoredAttentionConfig(BlockSpec):
    """Multi-matrix factorisation attention (Hu et al. 2024, arXiv:2412.19255), as in Step 3.

    Queries of all heads are expanded from one latent of width ``query_rank``, after an RMS norm
    with epsilon ``norm_eps``; all heads share one key and one value of a token. ``attention`` has
    the other options: heads, their width, scale and rope.
    """

    attention: AttentionConfig
    query_rank: int
    norm_eps: float

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    @property
    def inner(self) -> int:
        """The width of all heads' queries, and of their outputs."""
        return self.attention.num_heads * self.attention.head_dim

    def for_context(self, length: int) -> FactoredAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> FactoredAttentionConfig:
        """See ``MixerSpec``; every device has the whole latent, the key and the value."""
        return replace(self, attention=self.attention.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return self.attention.state(dtype)

    def with_pages(self, dtype: jnp.dtype) -> FactoredAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.with_pages(dtype))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        return self.attention.workspace(params, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, queries from latents of {self.query_rank}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.factored").FactoredAttention(self)
