"""The definition of index_topk: the positions with the largest scores, for each token alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC

NO_POSITION = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexTopkArgs:
    """The arguments of ``index_topk``."""

    q: jax.Array  # [T, H, D]
    weights: jax.Array  # float32[T, H]
    pages: jax.Array  # [P, S, D]
    page_table: jax.Array  # int32[B, M]
    rows: jax.Array  # int32[T]: the row of each token
    lens: jax.Array  # int32[T]: the first tokens of its row that each token sees; 0 for padding
    top_k: int = field(metadata=STATIC)

    @property
    def width(self) -> int:
        """K: the positions of a token, at most those that a row of the page table can have."""
        return min(self.top_k, self.page_table.shape[1] * self.pages.shape[1])


def index_topk(args: IndexTopkArgs) -> jax.Array:  # int32[T, K]
    """Equal scores are ordered by position."""
    q, weights, pages = (np.asarray(x, np.float32) for x in (args.q, args.weights, args.pages))
    table, size = np.asarray(args.page_table), pages.shape[1]
    found = np.full((len(q), args.width), NO_POSITION, np.int32)
    for token, (row, length) in enumerate(zip(np.asarray(args.rows), args.lens, strict=True)):
        at = np.arange(length)
        keys = pages[table[row, at // size], at % size]  # [length, D]
        scores = weights[token] @ np.maximum(q[token] @ keys.T, 0)
        best = np.argsort(-scores, kind="stable")[: args.width]
        found[token, : len(best)] = best
    return jnp.asarray(found)
