"""The definition of block_topk: the blocks with the largest scores, for each token alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC

NO_BLOCK = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockTopkArgs:
    """The arguments of ``block_topk``."""

    q: jax.Array  # [T, H, D]
    pages: jax.Array  # [P, S, D]
    page_table: jax.Array  # int32[B, M]
    rows: jax.Array  # int32[T]: the row of each token
    lens: jax.Array  # int32[T]: the first tokens of its row that each token sees; 0 for padding
    block: int = field(metadata=STATIC)  # positions
    top_k: int = field(metadata=STATIC)  # blocks
    local: int = field(metadata=STATIC)  # the last blocks, which every head chooses

    @property
    def num_blocks(self) -> int:
        """The most blocks of a row of the page table."""
        return -(-self.page_table.shape[1] * self.pages.shape[1] // self.block)

    @property
    def width(self) -> int:
        """K: the blocks that a head of a token chooses, at most those of a row."""
        return min(self.top_k, self.num_blocks)


def block_topk(args: BlockTopkArgs) -> jax.Array:  # int32[T, H, K]
    """Equal scores are ordered by position."""
    q, pages = (np.asarray(x, np.float32) for x in (args.q, args.pages))
    table, size = np.asarray(args.page_table), pages.shape[1]
    found = np.full((*q.shape[:2], args.width), NO_BLOCK, np.int32)
    for token, (row, length) in enumerate(zip(np.asarray(args.rows), args.lens, strict=True)):
        at = np.arange(length)
        keys = pages[table[row, at // size], at % size]  # [length, D]
        for head, scores in enumerate(q[token] @ keys.T):
            blocks = [scores[i : i + args.block].max() for i in range(0, length, args.block)]
            first = max(len(blocks) - args.local, 0)
            blocks[first:] = [np.inf] * (len(blocks) - first)
            best = np.argsort(-np.array(blocks), kind="stable")[: args.width]
            found[token, head, : len(best)] = best
    return jnp.asarray(found)
