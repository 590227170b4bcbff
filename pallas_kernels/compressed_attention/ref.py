"""The definition of compressed_attention: one softmax over the entries of a window and others."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CompressedAttentionArgs:
    """The arguments of ``compressed_attention``.

    The pools of compressed entries may hold them in pieces, in order, each of which has a place of
    its own in the pages. They are None together where a token reads its window alone.
    """

    q: jax.Array  # [T, N, H]
    pages: jax.Array  # [P, S, H]
    page_table: jax.Array  # int32[B, M]
    sinks: jax.Array  # float32[N]: scores of each head that only add to the sums of softmaxes
    rows: jax.Array  # int32[T]: the row of each token
    last: jax.Array  # int32[T]: its own entry among those of its row; -1: none
    far_pages: jax.Array | None = None  # [P', S', H / pieces]
    far_table: jax.Array | None = None  # int32[B, M']
    # The number of the first entries of the row, int32[T], or positions, int32[T, K]; -1: none
    reads: jax.Array | None = None
    window: int = field(metadata=STATIC)  # entries
    scale: float = field(metadata=STATIC)

    @property
    def has_choice(self) -> bool:
        """True if each token reads compressed entries at positions of its own."""
        return self.reads is not None and self.reads.ndim == 2

    @property
    def pieces(self) -> int:
        """The pieces of a compressed entry."""
        return 1 if self.far_pages is None else self.q.shape[2] // self.far_pages.shape[2]


def compressed_attention(args: CompressedAttentionArgs) -> jax.Array:  # [T, N, H]
    """Each token alone; those that read no entry yield zeros."""
    q, sinks = np.asarray(args.q, np.float32), np.asarray(args.sinks, np.float32)
    pool, out = np.asarray(args.pages, np.float32), np.zeros_like(q)
    for token, (row, last) in enumerate(zip(args.rows, args.last, strict=True)):
        at = np.arange(max(int(last) - args.window + 1, 0), int(last) + 1)
        found = [_entries(pool, np.asarray(args.page_table)[row], at, 1)]
        if args.reads is not None:
            own = np.asarray(args.reads)[token]
            at = own[own >= 0] if args.has_choice else np.arange(own)
            far, table = np.asarray(args.far_pages, np.float32), np.asarray(args.far_table)[row]
            found.append(_entries(far, table, at, args.pieces))
        entries = np.concatenate(found)
        if not len(entries):
            continue
        scores = q[token] @ entries.T * args.scale
        scores = np.concatenate((sinks[:, None], scores), axis=1)
        out[token] = np.asarray(jax.nn.softmax(scores, axis=1))[:, 1:] @ entries
    return jnp.asarray(out, args.q.dtype)


def _entries(
    pool: np.ndarray,  # float32[P, S, H / pieces]
    table: np.ndarray,  # int32[M]: of the row
    at: np.ndarray,  # int[K]
    pieces: int,
) -> np.ndarray:  # float32[K, H]
    """The entries of a row at these positions."""
    own = at[:, None] * pieces + np.arange(pieces)
    return pool[table[own // pool.shape[1]], own % pool.shape[1]].reshape(
        len(at), pieces * pool.shape[2]
    )
