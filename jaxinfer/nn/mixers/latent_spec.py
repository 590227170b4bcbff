"""The spec of multi-head latent attention; its module is in ``nn.mixers.latent``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, QueryGrowth, StepShape, part
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import SCALE, Entry, LayerState, PagedKind
from pallas_kernels.lib.latent_pages import ROPE_DTYPE, num_groups
from pallas_kernels.lib.page_scales import BITS

if TYPE_CHECKING:
    import flax.linen as nn

POOLS = ("latent", "latent" + SCALE, "rope")  # of a layer; the last two of 8-bit latents


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(BlockSpec):
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434).

    A key has ``nope_dim`` components of each head, and ``rope_dim`` that all heads share and that
    ``rope`` rotates, if it is not None. ``rank`` and ``query_rank`` are the widths of the latents
    of keys and values and of queries (None: queries have no latent), ``norm_eps`` is the epsilon of
    the norms of latents. With ``interleaved`` component 2i is rotated with 2i + 1, else i with i +
    rope_dim / 2. ``scale`` multiplies scores. With ``bias`` the projections from and to the
    residual stream have biases, but for queries without a latent. Queries may grow with the
    position. ``latent_scale`` multiplies the latents of keys and values, and with ``rope_norm`` the
    rotated key has an RMS norm first. With ``head_gate`` a
    sigmoid of the token multiplies the output of each head, if it is "components" one of its own
    each component; with ``output_gate`` sigmoids of the queries' latent, after its norm and before
    it, multiply each component. With ``sinks`` each head has a logit next to the scores, which only
    some mixers have (``mixers.indexed_latent``). With
    ``learned_growth`` queries of each head grow with the position (``mixers.heads``). Without
    ``own_entries`` those of an earlier layer are read (``mixers.indexed_latent``). ``page_dtype``
    is that of pages (None: the decoder's); 8 bits are those of latents alone
    (``pallas_kernels.lib.latent_pages``).
    """

    is_invariant: ClassVar[bool] = True
    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    query_rank: int | None
    scale: float
    rope: RopeConfig | None
    interleaved: bool = True
    norm_eps: float = 1e-6
    bias: bool = False
    growth: QueryGrowth | None = None
    latent_scale: float = 1.0
    rope_norm: bool = False
    head_gate: bool | Literal["components"] = False
    output_gate: bool = False
    learned_growth: bool = False
    sinks: bool = False
    own_entries: bool = True
    page_dtype: jnp.dtype | None = None

    @property
    def head_dim(self) -> int:
        """The width of queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def entry_dim(self) -> int:
        """The width of a token's entry in the pages: its latent and its rotated key."""
        return self.rank + self.rope_dim

    @property
    def bias_dim(self) -> int:
        """The width of the bias of the projection from the residual stream."""
        return (self.query_rank or 0) + self.entry_dim

    def for_context(self, length: int) -> Self:
        """See ``MixerSpec``."""
        return replace(self, rope=self.rope and self.rope.for_context(length))

    def share(self, devices: int) -> Self:
        """See ``MixerSpec``; every device has the whole latents."""
        return replace(self, num_heads=part(self.num_heads, devices, "heads"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``; all heads share the entries, so they are not divided."""
        latent, scale, rope = POOLS
        if (pages := self.page_dtype or dtype) != BITS:
            return LayerState((PagedKind((Entry(latent, (self.entry_dim,), pages),)),))
        entries = (
            Entry(latent, (self.rank,), BITS),
            Entry(scale, (num_groups(self.rank),), jnp.dtype(jnp.float32)),
            Entry(rope, (self.rope_dim,), ROPE_DTYPE),
        )
        return LayerState((PagedKind(entries),))

    def with_pages(self, dtype: jnp.dtype) -> Self | None:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.value_dim)}

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").latent_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.num_heads} heads over latents of {self.rank}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.latent").LatentAttention(self)
