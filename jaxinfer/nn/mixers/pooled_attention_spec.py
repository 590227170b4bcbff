"""The spec of grouped-query attention to blocks that are chosen by means of their keys.

Its module is in ``nn.mixers.pooled_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, kv_part, part
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.mixers.compressed_spec import OPEN_KEY, CompressorConfig
from jaxinfer.nn.mixers.indexed_latent_spec import index_keys
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class PooledIndexerConfig:
    """Qwen3.8-Flash-Next's indexer (``modeling_qwen4_exp`` of Hugging Face transformers).

    It has ``num_heads`` queries of ``head_dim`` components and one key a token. The mean of the
    keys of each ``block`` tokens is the key of the block, which has an RMS norm, as queries have,
    and then rotates with the attention's rope at the block's first position. All heads of a layer
    attend to the ``top_k`` whole blocks with the largest sums of positive products with queries,
    and to the tokens behind the last whole block.
    """

    num_heads: int
    head_dim: int
    block: int
    top_k: int

    @property
    def reach(self) -> int:
        """The longest context that is chosen whole."""
        return self.top_k * self.block + self.block - 1


@dataclass(frozen=True, kw_only=True)
class PooledAttentionConfig(AttentionConfig):
    """Grouped-query attention in which each token attends to blocks of its context.

    They are chosen by an ``indexer``, whose keys of blocks are a paged kind of their own, next to
    an unfinished block's mean in the state of a sequence. Heads have an RMS norm before rope.
    Without ``selects`` no context of an engine is longer than the chosen blocks, so that all tokens
    are attended to and no keys of blocks are kept.
    """

    is_invariant_on_gpu: ClassVar[bool] = False
    indexer: PooledIndexerConfig
    selects: bool = True

    def __post_init__(self) -> None:
        """Check that heads are those that the module makes."""
        assert self.qk_norm == "head" and self.rope is not None, "other heads are not rotated"

    def for_context(self, length: int) -> PooledAttentionConfig:
        """See ``MixerSpec``."""
        rope = self.rope and self.rope.for_context(length)
        return replace(self, rope=rope, selects=length > self.indexer.reach)

    def share(self, devices: int) -> PooledAttentionConfig:
        """See ``MixerSpec``; every device has the whole indexer."""
        heads = part(self.num_heads, devices, "query heads")
        return replace(self, num_heads=heads, num_kv_heads=kv_part(self.num_kv_heads, devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        own, c = super().state(dtype), self.indexer
        if not self.selects:
            return own
        keys = replace(index_keys(c.head_dim, self.page_dtype or dtype), tokens_per_entry=c.block)
        mean = CompressorConfig(ratio=c.block).open_windows(OPEN_KEY, c.head_dim)
        return replace(own, paged=(*own.paged, keys), per_slot=(mean,), align=c.block)

    def with_pages(self, dtype: jnp.dtype) -> PooledAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        if not self.selects:
            return super().workspace(params, step)
        bounds = import_module("jaxinfer.nn.mixers.pooled_bounds")
        return bounds.pooled_attention_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        c = self.indexer
        blocks = f"{c.top_k} blocks of {c.block} tokens"
        return f"{super().words()}, {blocks} chosen by {c.num_heads} heads of {c.head_dim}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.pooled_attention").PooledAttention(self)
