"""sparse_latent in plain XLA: some tokens at a time gather their entries and attend to them.

Queries absorb the expansion to keys, since each token reads entries of its own, which would be
expanded for it alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.lib.latent_pages import entries_of, pools_of
from pallas_kernels.lib.token_tiles import by_tiles, tile_width, wide_einsum
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

TILE_BYTES = 64 << 20  # of the entries that a tile gathers


@partial(jax.jit, static_argnames="fixed")  # one trace serves every layer
def sparse_latent(args: SparseLatentArgs, *, fixed: bool = False) -> jax.Array:  # [T, N, V]
    """See ``sparse_latent.api``; ``fixed`` as in ``index_topk.xla``."""
    pools, heads, rank = pools_of(args), args.q.shape[1], args.k_up.shape[1]
    page_size, dtype = jnp.int32(args.pages.shape[1]), args.q.dtype
    k_up, v_up = (w.reshape(heads, -1, rank) for w in (args.k_up, args.v_up))

    def of_tile(
        q: jax.Array,  # [W, N, D + R]
        rows: jax.Array,  # int32[W]
        positions: jax.Array,  # int32[W, K]
    ) -> jax.Array:  # [W, N, V]
        reads, at = positions >= 0, jnp.maximum(positions, 0)
        ids = args.page_table.at[rows[:, None], jax.lax.div(at, page_size)].get(mode="clip")
        offsets = jax.lax.rem(at, page_size)
        found = entries_of(tuple([pool.at[ids, offsets].get(mode="clip") for pool in pools]))
        # 0 * NaN is NaN, and unwritten slots may hold NaN, so those become 0
        entries = jnp.where(reads[..., None], found, 0.0).astype(dtype)  # [W, K, C + R]
        nope, rope = jnp.split(q, (k_up.shape[1],), axis=2)
        absorbed = wide_einsum("WND,NDC->WNC", nope, k_up).astype(dtype)
        queries = jnp.concatenate((absorbed, rope), axis=2)
        scores = wide_einsum("WNC,WKC->WNK", queries, entries) * args.scale
        scores = jnp.where(reads[:, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=2, keepdims=True)
        sinks = -jnp.inf if args.sinks is None else args.sinks.astype(jnp.float32)[:, None]
        top = jnp.maximum(top, sinks)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        p = jnp.exp(scores - top)
        mixed = wide_einsum("WNK,WKC->WNC", p.astype(dtype), entries[..., :rank])
        sums = jnp.sum(p, axis=2, keepdims=True) + jnp.exp(sinks - top)
        mixed = (mixed / jnp.where(sums == 0, 1.0, sums)).astype(dtype)
        return wide_einsum("WNC,NVC->WNV", mixed, v_up).astype(dtype)

    most = 1 if fixed else _most_tokens(args)
    return by_tiles(of_tile, (args.q, args.rows, args.positions), most)


def _most_tokens(args: SparseLatentArgs) -> int:
    """The tokens whose gathered entries, in float32 if pages have 8 bits, take ``TILE_BYTES``."""
    width, count = sum(pool.shape[-1] for pool in pools_of(args)[::2]), args.positions.shape[1]
    return TILE_BYTES // (4 * width * count)


def workspace(args: SparseLatentArgs) -> int:
    """A tile's entries as they are gathered and in the dtype of queries, its scores and weights,
    and its absorbed queries and sums of latents.
    """
    (tokens, heads, _), rank = args.q.shape, args.k_up.shape[1]
    tile, count = tile_width(tokens, _most_tokens(args)), args.positions.shape[1]
    width = sum(pool.shape[-1] for pool in pools_of(args)[::2])
    of_token = 8 * width * count + 12 * heads * count + 16 * heads * (rank + width)
    return tile * of_token
