"""The spec of latent attention to chosen tokens; its module is in ``nn.mixers.indexed_latent``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.state import Entry, LayerState, PagedKind
from pallas_kernels.lib.latent_pages import ROPE_DTYPE
from pallas_kernels.lib.page_scales import BITS

if TYPE_CHECKING:
    import flax.linen as nn

KEY = "index_key"  # the entry of a token in the indexer's pages
# values of a step that a layer passes to those that follow it
CHOSEN = "chosen"  # int32[T, K]: the positions of each token; -1 for none
SHARED = "shared"  # the pools of its entries and their page table; in the dense form the entries


def index_keys(width: int, pages: jnp.dtype, tokens: int = 1) -> PagedKind:
    """The pages of an indexer's keys, one for so many tokens, which have 16 bits if other ``pages``
    have 8.
    """
    entry = Entry(KEY, (width,), ROPE_DTYPE if pages == BITS else pages)
    return PagedKind((entry,), tokens_per_entry=tokens)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """DeepSeek's lightning indexer (DeepSeek-V3.2, 2025, arXiv:2512.02556).

    It has ``num_heads`` queries of ``head_dim`` components, made of the latent of queries, and one
    key a token with a LayerNorm. The first components of both, as many as those of the attention's
    rope, rotate with it: ``interleaved`` pairs, or i with i + half. With ``of_tokens`` queries are
    made of a LayerNorm of the token instead. ``learned_growth`` is as that of attention. With
    ``rotates_last`` the last components rotate instead of the first.
    """

    num_heads: int
    head_dim: int
    interleaved: bool
    norm_eps: float = 1e-6
    of_tokens: bool = False
    learned_growth: bool = False
    rotates_last: bool = False


@dataclass(frozen=True, kw_only=True)
class IndexedLatentConfig(LatentAttentionConfig):
    """Latent attention in which each token attends to ``top_k`` tokens of its context.

    Those are chosen by an ``indexer``, whose keys are a paged kind of their own, or are those that
    the layer ``follows`` has chosen. With ``input_gate`` a gate of this rank follows the norm
    before all of it (``nn.norm_gate``). Without ``selects`` no context of an engine is longer than
    ``top_k``, so that all tokens are attended to and no keys are kept. A layer ``reads`` the
    latents of an earlier one, which ``shares`` them. With ``always`` the layers select in any
    context, which those of a decoder with such layers or with sinks have to.
    """

    top_k: int
    indexer: IndexerConfig | None
    follows: int | None = None
    input_gate: int | None = None
    selects: bool = True
    reads: int | None = None
    shares: bool = False
    always: bool = False

    def __post_init__(self) -> None:
        """Check that the choice is made once."""
        assert (self.indexer is None) != (self.follows is None), "an indexer, or another layer's"
        assert (self.reads is None) == self.own_entries, "a layer has entries or reads others"
        assert self.always or not self.sinks, "attention to all tokens has no sinks"

    @property
    def tokens_per_key(self) -> int:
        """The tokens of the context that have one key of the indexer."""
        return 1

    @property
    def most_tokens(self) -> int:
        """The most tokens to which a token attends."""
        return self.top_k

    def for_context(self, length: int) -> Self:
        """See ``MixerSpec``."""
        rope = self.rope and self.rope.for_context(length)
        return replace(self, rope=rope, selects=self.always or length > self.top_k)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``. With 8-bit latents the indexer's keys have 16 bits."""
        paged = super().state(dtype).paged if self.own_entries else ()
        if self.indexer is not None and self.selects:
            pages = self.page_dtype or dtype
            paged = (*paged, index_keys(self.indexer.head_dim, pages, self.tokens_per_key))
        sources = ((CHOSEN, self.follows), (SHARED, self.reads))
        follows = tuple((name, layer) for name, layer in sources if layer is not None)
        return LayerState(paged, follows=follows)

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        if not self.selects:
            return super().workspace(params, step)
        return import_module("jaxinfer.nn.mixers.bounds").indexed_latent_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        by = "by an earlier layer"
        if (c := self.indexer) is not None:
            by = f"by {c.num_heads} heads of {c.head_dim}"
        return f"{super().words()}, {self.top_k} tokens chosen {by}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.indexed_latent").IndexedLatentAttention(self)
