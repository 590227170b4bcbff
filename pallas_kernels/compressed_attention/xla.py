"""compressed_attention in plain XLA: some tokens at a time gather their entries.

Those of the window and at chosen positions are gathered at once, and the first entries of a row
some pages at a time.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.lib.context_scores import padded_table
from pallas_kernels.lib.token_tiles import by_tiles, tile_width, wide_einsum

BLOCK = 128  # first entries of rows that are read at a time
TILE_BYTES = 64 << 20  # of the entries that a tile of tokens gathers, in float32


class _Pool(NamedTuple):
    """Entries of one kind, or pieces of them in order, and the pages of each row."""

    entries: jax.Array  # [P, S, H], or [P, S, H / pieces]
    page_table: jax.Array  # int32[B, M]


@jax.jit  # one trace serves every layer
def compressed_attention(args: CompressedAttentionArgs) -> jax.Array:  # [T, N, H]
    """See ``compressed_attention.api``."""
    near, sinks = _Pool(args.pages, args.page_table), args.sinks.astype(jnp.float32)
    window = min(args.window, args.page_table.shape[1] * args.pages.shape[1])
    far = None
    if args.far_pages is not None and args.far_table is not None:
        far = _Pool(args.far_pages, args.far_table)

    def of_tile(
        q: jax.Array,  # [W, N, H]
        rows: jax.Array,  # int32[W]
        last: jax.Array,  # int32[W]
        *reads: jax.Array,
    ) -> jax.Array:  # [W, N, H]
        found = [_read(near, rows, last[:, None] - jnp.arange(window))]
        if far is not None and args.has_choice:
            found.append(_read(far, rows, reads[0]))
        entries, seen = (jnp.concatenate(both, axis=1) for both in zip(*found, strict=True))
        own = jnp.broadcast_to(sinks[:, None], (*q.shape[:2], 1))
        softmax = _Softmax(own, jnp.ones_like(own), jnp.zeros(q.shape, jnp.float32))
        softmax = softmax.after(q, entries, seen, args.scale)
        if far is not None and not args.has_choice:
            softmax = _after_all(softmax, q, far, rows, reads[0], args.scale)
        return (softmax.mixed / softmax.sums).astype(q.dtype)

    given = (args.q, args.rows, args.last)
    given = given if args.reads is None else (*given, args.reads)
    return by_tiles(of_tile, given, _most_tokens(args))


class _Softmax(NamedTuple):
    """A running softmax of some tokens' scores, and the sum of entries with its weights."""

    most: jax.Array  # float32[W, N, 1]
    sums: jax.Array  # float32[W, N, 1]
    mixed: jax.Array  # float32[W, N, H]

    def after(
        self,
        q: jax.Array,  # [W, N, H]
        entries: jax.Array,  # [W, K, H]
        seen: jax.Array,  # bool[W, K]
        scale: float,
    ) -> _Softmax:
        """The softmax after further entries, as far as they are seen."""
        entries = jnp.where(seen[..., None], entries, 0).astype(q.dtype)  # unwritten may be NaN
        scores = wide_einsum("WNH,WKH->WNK", q, entries) * scale
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        most = jnp.maximum(self.most, jnp.max(scores, axis=2, keepdims=True))
        p, old = jnp.exp(scores - most), jnp.exp(self.most - most)
        sums = old * self.sums + jnp.sum(p, axis=2, keepdims=True)
        mixed = wide_einsum("WNK,WKH->WNH", p.astype(q.dtype), entries)
        return _Softmax(most, sums, old * self.mixed + mixed)


def _after_all(
    softmax: _Softmax,
    q: jax.Array,  # [W, N, H]
    far: _Pool,
    rows: jax.Array,  # int32[W]
    lens: jax.Array,  # int32[W]
    scale: float,
) -> _Softmax:
    """The softmax after the first entries of each token's row, some pages at a time."""
    pieces, size = q.shape[2] // far.entries.shape[2], far.entries.shape[1]
    unit = pieces // gcd(pieces, size)  # the fewest pages with whole entries
    table = padded_table(far.page_table, unit)
    block = min(unit * max(1, BLOCK // (unit * size // pieces)), table.shape[1])
    length = block * size // pieces  # entries
    ids = jnp.take(padded_table(table, block), rows, axis=0, mode="clip")
    ids = ids.reshape(len(ids), -1, block).swapaxes(0, 1)  # [blocks, W, pages]
    starts = jnp.arange(len(ids), dtype=jnp.int32) * length

    def read(softmax: _Softmax, one: tuple[jax.Array, jax.Array]) -> _Softmax:
        start, pages = one
        entries = far.entries.at[pages].get(mode="clip").reshape(len(q), length, -1)
        seen = start + jnp.arange(length) < lens[:, None]
        return softmax.after(q, entries, seen, scale)

    def step(softmax: _Softmax, one: tuple[jax.Array, jax.Array]) -> tuple[_Softmax, None]:
        is_read = one[0] < jnp.max(lens)
        return jax.lax.cond(is_read, read, lambda softmax, _: softmax, softmax, one), None

    # a scan, since a loop whose number of blocks is not known has no gradient
    return jax.lax.scan(step, softmax, (starts, ids))[0]


def _read(
    pool: _Pool,
    rows: jax.Array,  # int32[W]
    positions: jax.Array,  # int32[W, K]
) -> tuple[jax.Array, jax.Array]:  # [W, K, H], bool[W, K]
    """The entries of these rows at these positions, and which positions are not negative."""
    at, size = jnp.maximum(positions, 0), jnp.int32(pool.entries.shape[1])
    ids = pool.page_table.at[rows[:, None], jax.lax.div(at, size)].get(mode="clip")
    return pool.entries.at[ids, jax.lax.rem(at, size)].get(mode="clip"), positions >= 0


def _at_once(args: CompressedAttentionArgs) -> int:
    """The most entries that a token reads at a time, in contexts of any length."""
    if args.reads is None:
        return args.window
    return args.window + args.reads.shape[1] if args.has_choice else max(args.window, BLOCK)


def _most_tokens(args: CompressedAttentionArgs) -> int:
    """The tokens whose gathered entries take ``TILE_BYTES``."""
    return TILE_BYTES // (4 * args.q.shape[2] * _at_once(args))


def workspace(args: CompressedAttentionArgs) -> int:
    """The entries that a tile gathers, their scores and weights, and its queries and sums."""
    (tokens, heads, width), count = args.q.shape, _at_once(args)
    of_token = 3 * 4 * count * (width + heads) + 4 * 4 * heads * width
    return tile_width(tokens, _most_tokens(args)) * of_token
