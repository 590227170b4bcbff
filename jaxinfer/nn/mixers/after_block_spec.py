"""The spec of a mixer after a block that several layers use; its module is in
``nn.mixers.after_block``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import AttentionConfig, FeedForwardConfig, MixerSpec
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class AfterBlockConfig(MixerSpec):
    """A mixer with a state for each sequence, after a block of attention and a network that other
    layers use as well (Zamba: Glorioso et al. 2024, arXiv:2405.16712).

    The block's weights are number ``block`` of ``SharedBlocksConfig``. Attention reads a norm of
    the stream and of the token's embedding, one behind the other; the network a norm of attention's
    output. A projection of its output, of this layer alone, is added to what ``other`` reads, and
    not to the stream. Queries, keys and values may have addends of rank ``qkv_rank`` of this layer,
    gates and ups of rank ``gate_up_rank``.
    """

    block: int
    attention: AttentionConfig
    network: FeedForwardConfig
    other: MixerSpec
    qkv_rank: int | None = None
    gate_up_rank: int | None = None

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> AfterBlockConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> AfterBlockConfig:
        """See ``MixerSpec``."""
        return replace(
            self,
            attention=self.attention.share(devices),
            network=self.network.share(devices),
            other=self.other.share(devices),
        )

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return replace(self.other.state(dtype), paged=self.attention.state(dtype).paged)

    def with_pages(self, dtype: jnp.dtype) -> AfterBlockConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.with_pages(dtype))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``; those of attention."""
        return self.attention.points()

    def words(self) -> str:
        """See ``MixerSpec``."""
        block = f"block {self.block} of {self.attention.words()} and {self.network.words()}"
        return f"{self.other.words()} after {block}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: that of both mixers, and what the block's matrices read and write,
        which are no parameters of the layer.
        """
        c, (tokens, width) = self.attention, step.x.shape
        heads = c.num_heads + 2 * c.num_kv_heads
        ranks = 3 * (self.qkv_rank or 0) + (self.gate_up_rank or 0)
        own = 8 * width + 2 * heads * c.head_dim + 3 * self.network.width + ranks
        both = c.workspace(params, step) + self.other.workspace(params, step)
        return both + tokens * own * step.x.dtype.itemsize

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.after_block").AfterBlock(self)
