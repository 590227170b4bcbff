"""The spec of grouped-query attention to chosen blocks; its module is in
``nn.mixers.indexed_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, kv_part, part
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.mixers.indexed_latent_spec import index_keys
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class BlockIndexerConfig:
    """MiniMax-M3's indexer (``modeling_minimax_m3_vl`` of Hugging Face transformers).

    Each of ``num_heads`` queries of ``head_dim`` components chooses ``top_k`` blocks of ``block``
    tokens for one KV head: the last ``local`` ones, and those with the largest scores. Queries, and
    the one key of a token, have RMS norms and rotate with the attention's rope in their first
    components.
    """

    num_heads: int
    head_dim: int
    block: int
    top_k: int
    local: int

    @property
    def reach(self) -> int:
        """The tokens of the chosen blocks, all of a shorter context."""
        return self.top_k * self.block


@dataclass(frozen=True, kw_only=True)
class IndexedAttentionConfig(AttentionConfig):
    """Grouped-query attention in which each token attends to blocks of its context.

    They are chosen by an ``indexer``, whose keys are a paged kind of their own. Heads have an RMS
    norm before rope. Without ``selects`` no context of an engine is longer than the chosen blocks,
    so that all tokens are attended to and no keys are kept.
    """

    is_invariant_on_gpu: ClassVar[bool] = False
    indexer: BlockIndexerConfig
    selects: bool = True

    def __post_init__(self) -> None:
        """Check that every KV head has blocks, and that this is all that differs."""
        assert self.indexer.num_heads == self.num_kv_heads, "a choice for each KV head"
        assert self.qk_norm == "head" and self.rope is not None, "other heads are not rotated"

    def for_context(self, length: int) -> IndexedAttentionConfig:
        """See ``MixerSpec``."""
        rope = self.rope and self.rope.for_context(length)
        return replace(self, rope=rope, selects=length > self.indexer.reach)

    def share(self, devices: int) -> IndexedAttentionConfig:
        """See ``MixerSpec``."""
        pairs = kv_part(self.num_kv_heads, devices)
        return replace(
            self,
            num_heads=part(self.num_heads, devices, "query heads"),
            num_kv_heads=pairs,
            indexer=replace(self.indexer, num_heads=pairs),
        )

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        own = super().state(dtype)
        if not self.selects:
            return own
        keys = index_keys(self.indexer.head_dim, self.page_dtype or dtype)
        return replace(own, paged=(*own.paged, keys))

    def with_pages(self, dtype: jnp.dtype) -> IndexedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        if not self.selects:
            return super().workspace(params, step)
        return import_module("jaxinfer.nn.mixers.bounds").indexed_attention_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        c = self.indexer
        blocks = f"{c.top_k} blocks of {c.block} tokens"
        return f"{super().words()}, {blocks} chosen by {c.num_heads} heads of {c.head_dim}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.indexed_attention").IndexedAttention(self)
