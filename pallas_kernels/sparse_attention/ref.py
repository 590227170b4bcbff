"""The definition of sparse_attention: attention over the positions of chosen blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.page_scales import pools_of, values_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SparseAttentionArgs:
    """The arguments of ``sparse_attention``."""

    q: jax.Array  # [T, N, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    page_table: jax.Array  # int32[B, M]
    rows: jax.Array  # int32[T]: the row of each token
    lens: jax.Array  # int32[T]: the first tokens of its row that each token sees; 0 for padding
    blocks: jax.Array  # int32[T, K, C]: those that the queries of a KV head read; -1: none
    k_scales: jax.Array | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: jax.Array | None = None  # float32[P, S, K]
    block: int = field(metadata=STATIC)  # positions
    scale: float = field(metadata=STATIC)


def sparse_attention(args: SparseAttentionArgs) -> jax.Array:  # [T, N, H]
    """Each token and KV head alone; those that read no position yield zeros."""
    q, table = np.asarray(args.q, np.float32), np.asarray(args.page_table)
    pools = [np.asarray(values_of(jnp.asarray(pool))) for pool in (args.k_pages, args.v_pages)]
    scales = [np.asarray(x)[..., None] for x in pools_of(args)[2:]] or [1.0, 1.0]
    k_pool, v_pool = (pool * by for pool, by in zip(pools, scales, strict=True))
    size, heads, out = k_pool.shape[1], k_pool.shape[2], np.zeros_like(q)
    grouped = q.reshape(len(q), heads, -1, q.shape[2])
    for token, (row, length) in enumerate(zip(np.asarray(args.rows), args.lens, strict=True)):
        for head, chosen in enumerate(np.asarray(args.blocks)[token]):
            at = chosen[chosen >= 0][:, None] * args.block + np.arange(args.block)
            at = at[at < int(length)]
            if not len(at):
                continue
            slots = table[row, at // size], at % size, head
            scores = grouped[token, head] @ k_pool[slots].T * args.scale  # [G, L]
            made = np.asarray(jax.nn.softmax(scores, axis=1)) @ v_pool[slots]
            out[token].reshape(grouped.shape[1:])[head] = made
    return jnp.asarray(out, args.q.dtype)
