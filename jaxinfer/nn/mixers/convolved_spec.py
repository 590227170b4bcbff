"""The spec of attention whose queries and keys pass convolutions; ``convolved`` has its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import Entry, LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class ConvolvedAttentionConfig(BlockSpec):
    """Compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476), as in ZAYA.

    Queries and keys pass a causal convolution of single channels over ``conv_width`` tokens, and
    one of whole heads over two. Half of the values are those of the token before. ``attention`` has
    the other options.
    """

    attention: AttentionConfig
    conv_width: int

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    @property
    def channels(self) -> int:
        """Elements of queries and keys."""
        return (self.attention.num_heads + self.attention.num_kv_heads) * self.attention.head_dim

    @property
    def delayed(self) -> int:
        """Elements of the values that are those of the token before."""
        return self.attention.num_kv_heads * self.attention.head_dim // 2

    def for_context(self, length: int) -> ConvolvedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: pages, and the last inputs of both convolutions and of the delay."""
        taps, before = (self.conv_width, self.channels), (2, self.channels + self.delayed)
        own = (Entry("conv", taps, dtype), Entry("before", before, dtype))
        return replace(self.attention.state(dtype), per_slot=own)

    def with_pages(self, dtype: jnp.dtype) -> ConvolvedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.with_pages(dtype))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        own = import_module("jaxinfer.nn.mixers.bounds").convolved_bytes(self, step)
        return self.attention.workspace(params, step) + own

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, after convolutions"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.convolved").ConvolvedAttention(self)
