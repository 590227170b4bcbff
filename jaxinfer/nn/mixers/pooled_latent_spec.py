"""The spec of latent attention to pools of tokens that an indexer chooses (GLM-5.3-Flash).

Its module is in ``nn.mixers.pooled_latent``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.compressed_spec import OPEN_KEY, CompressorConfig
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class PooledLatentConfig(IndexedLatentConfig):
    """Latent attention in which each token attends to the tokens of the ``top_k / pool`` pools of
    its context with the best keys, and to those of the pool that is not complete.

    A pool is ``pool`` tokens from a multiple of that on. Its key is a mean of their keys, of which
    each component has the weights of a softmax, of a projection of the tokens plus a bias of the
    place in the pool. ``top_k`` is a multiple of ``pool``.
    """

    is_invariant: ClassVar[bool] = False  # decode rows add to a pool's softmax one by one
    pool: int

    def __post_init__(self) -> None:
        """Check that whole pools are chosen."""
        super().__post_init__()
        assert self.top_k % self.pool == 0, "whole pools are chosen"

    @property
    def tokens_per_key(self) -> int:
        """See ``IndexedLatentConfig``."""
        return self.pool

    @property
    def most_tokens(self) -> int:
        """See ``IndexedLatentConfig``."""
        return self.top_k + self.pool - 1

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: also the pool that is not complete."""
        state = super().state(dtype)
        if self.indexer is None or not self.selects:
            return state
        entry = CompressorConfig(ratio=self.pool).open_windows(OPEN_KEY, self.indexer.head_dim)
        return replace(state, per_slot=(entry,), align=self.pool)

    def with_pages(self, dtype: jnp.dtype) -> Self | None:
        """See ``MixerSpec``; 8-bit latents without rotated keys have no form yet."""
        return replace(self, page_dtype=dtype) if self.rope_dim else None

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        if not self.selects:
            return super().workspace(params, step)
        return import_module("jaxinfer.nn.mixers.bounds").pooled_latent_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{super().words()} in pools of {self.pool}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.pooled_latent").PooledLatentAttention(self)
