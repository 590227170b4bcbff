"""The spec of attention whose queries have a latent; ``nn.mixers.factored`` has its module."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from jaxinfer.nn.mixers.around_spec import AroundAttention

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class FactoredAttentionConfig(AroundAttention):
    """Multi-matrix factorisation attention (Hu et al. 2024, arXiv:2412.19255), as in Step 3.

    Queries of all heads are expanded from one latent of width ``query_rank``, after an RMS norm
    with epsilon ``norm_eps``; all heads share one key and one value of a token. Every device has
    the whole latent, the key and the value.
    """

    query_rank: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """The width of all heads' queries, and of their outputs."""
        return self.attention.num_heads * self.attention.head_dim

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, queries from latents of {self.query_rank}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.factored").FactoredAttention(self)
