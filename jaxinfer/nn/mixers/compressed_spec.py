"""The spec of attention to a window and to compressed tokens (DeepSeek-V4).

Its module is in ``nn.mixers.compressed``. A layer has N heads of width H, queries with a latent of
width Q, and G groups of N / G heads with R outputs each. Its parameters, with the residual stream's
width D:

    q_kv_a  [D, Q + H]         the latent of queries, then the one key, which is the value too
    q_norm  [Q]                kv_norm [H]                      q_b [Q, N * H]
    sinks   float32[N]
    o_a     [G, R, N * H / G]  a stack as experts are: by output
    o_b     [G * R, D]

A layer that compresses windows of W tokens has in addition

    compress      [D, 2 * H]          values, then gates
    compress_bias float32[W, H]       of the gates     compress_norm [H]

and one with an indexer of J heads of width I, whose windows have two series, of the next window and
of their own, in this order both in values and in gates:

    compress       [D, 4 * H]         compress_bias float32[W, 2 * H]  compress_norm [H]
    index_compress [D, 4 * I]         index_compress_bias float32[W, 2 * I]
    index_compress_norm [I]
    index_q        [Q, J * I]         index_weights [J, D]

The last ``rope.head_dim`` components of a head, an entry and an indexer's key rotate, 2i with
2i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape, part
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import Entry, LayerState, PagedKind

if TYPE_CHECKING:
    import flax.linen as nn

NEAR, FAR, KEY = "kv", "compressed", "index_key"  # entries of pages: of a token, of a window
OPEN, OPEN_KEY = "open", "open_key"  # those of a sequence: its unfinished windows
PIECE = 8  # tokens for which pages have a piece of a long window's entry
TRIPLE = 3  # maximum, sum and weighted sum of a running softmax: see ``nn.mixers.windows``


@dataclass(frozen=True, kw_only=True)
class EntryIndexerConfig:
    """The indexer of compressed entries: ``num_heads`` queries of ``head_dim`` components, made of
    the latent of queries, choose ``top_k`` entries by keys, which are compressed like the entries.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """Windows of ``ratio`` tokens that become one entry each.

    Without an ``indexer`` each token attends to the entries of all whole windows before it (heavily
    compressed attention), and a window's tokens have one series of values. With one it attends to
    those that the indexer chooses (compressed sparse attention), and they have two: a window's
    entry is made of its own series and of the other one of the window before it.
    """

    ratio: int
    indexer: EntryIndexerConfig | None = None

    @property
    def num_series(self) -> int:
        """The series of values that each token has."""
        return 1 if self.indexer is None else 2

    @property
    def num_pieces(self) -> int:
        """The pieces of an entry in pages, each for ``PIECE`` tokens if a window has more.

        A prefix is reused up to a border of pages: with pages of 16 entries, one of 16 windows of
        128 tokens would be every 2,048 tokens, and one of 16 pieces is every 128.
        """
        return 1 if self.ratio % PIECE else self.ratio // PIECE

    def open_windows(self, name: str, width: int) -> Entry:
        """The state of unfinished windows: a triple of each series, and one of the last whole
        window's first series, if there are two.
        """
        shape = (2 * self.num_series - 1, TRIPLE, width)
        return Entry(name, shape, jnp.dtype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionConfig(BlockSpec):
    """Attention to the last ``window`` tokens and, with a ``compressor``, to compressed ones: one
    softmax with a sink of each head (DeepSeek-V4, 2026).

    All ``num_heads`` heads share one key of ``head_dim`` components, which is the value too; so the
    output is rotated back. ``query_rank`` is the width of the latent of queries, whose heads have
    an RMS norm without weights. The output projection is that of each of ``num_groups`` groups of
    heads to ``group_rank`` components, then one matrix.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    window: int
    num_groups: int
    group_rank: int
    rope: RopeConfig
    compressor: CompressorConfig | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check that pages can have an entry in pieces, and keys whole."""
        if (c := self.compressor) is not None:
            assert self.head_dim % c.num_pieces == 0, "pieces of an entry have one width"
            assert c.indexer is None or c.num_pieces == 1, "an indexer reads whole keys"

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5

    def for_context(self, length: int) -> CompressedAttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, rope=self.rope.for_context(length))

    def share(self, devices: int) -> CompressedAttentionConfig:
        """See ``MixerSpec``; every device has all entries and the whole indexer."""
        return replace(
            self,
            num_heads=part(self.num_heads, devices, "heads"),
            num_groups=part(self.num_groups, devices, "groups of heads"),
        )

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``; all heads share the entries, so they are not divided."""
        near = PagedKind((Entry(NEAR, (self.head_dim,), dtype),), self.window)
        if (c := self.compressor) is None:
            return LayerState((near,))
        entries = [Entry(FAR, (self.head_dim // c.num_pieces,), dtype)]
        windows = [c.open_windows(OPEN, self.head_dim)]
        if (index := c.indexer) is not None:
            entries.append(Entry(KEY, (index.head_dim,), dtype))
            windows.append(c.open_windows(OPEN_KEY, index.head_dim))
        far = PagedKind(tuple(entries), tokens_per_entry=c.ratio // c.num_pieces)
        return LayerState((near, far), tuple(windows), align=c.ratio)

    def with_pages(self, dtype: jnp.dtype) -> None:
        """See ``MixerSpec``; entries of 8 bits have no form yet."""
        del dtype

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.head_dim)}

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").compressed_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        near = f"{self.num_heads} heads over {self.window} tokens"
        if (c := self.compressor) is None:
            return near
        if c.indexer is None:
            return f"{near} and all windows of {c.ratio}"
        return f"{near} and {c.indexer.top_k} windows of {c.ratio}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.compressed").CompressedAttention(self)
