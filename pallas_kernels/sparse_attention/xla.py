"""sparse_attention in plain XLA: some tokens at a time gather their keys and values."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.lib.page_scales import pools_of, values_of
from pallas_kernels.lib.token_tiles import by_tiles, tile_width, wide_einsum
from pallas_kernels.sparse_attention.ref import SparseAttentionArgs

TILE_BYTES = 64 << 20  # of the keys and values that a tile gathers, in float32


@partial(jax.jit, static_argnames="fixed")  # one trace serves every layer
def sparse_attention(args: SparseAttentionArgs, *, fixed: bool = False) -> jax.Array:  # [T, N, H]
    """See ``sparse_attention.api``; ``fixed`` as in ``block_topk.xla``."""
    pools, dtype = pools_of(args), args.q.dtype
    page_size, kv_heads = jnp.int32(args.k_pages.shape[1]), args.k_pages.shape[2]

    def of_tile(
        q: jax.Array,  # [W, N, H]
        rows: jax.Array,  # int32[W]
        lens: jax.Array,  # int32[W]
        blocks: jax.Array,  # int32[W, K, C]
    ) -> jax.Array:  # [W, N, H]
        at = blocks[..., None] * args.block + jnp.arange(args.block)
        reads = (blocks[..., None] >= 0) & (at < lens[:, None, None, None])
        at, reads = (x.reshape(*blocks.shape[:2], -1) for x in (jnp.maximum(at, 0), reads))
        ids = args.page_table.at[rows[:, None, None], jax.lax.div(at, page_size)].get(mode="clip")
        slots = ids, jax.lax.rem(at, page_size), jnp.arange(kv_heads)[:, None]
        # [W, K, L, H], of scales [W, K, L]
        found = [pool.at[slots].get(mode="clip") for pool in pools]
        if len(found) > 2:
            pairs = zip(found[:2], found[2:], strict=True)
            found = [values_of(x) * scales[..., None] for x, scales in pairs]
        # 0 * NaN is NaN, and unwritten slots may hold NaN, so those become 0
        k, v = (jnp.where(reads[..., None], x, 0).astype(dtype) for x in found)
        grouped = q.reshape(len(q), kv_heads, -1, q.shape[2])
        scores = wide_einsum("WKGH,WKLH->WKGL", grouped, k) * args.scale
        scores = jnp.where(reads[:, :, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=3, keepdims=True)
        p = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        mixed = wide_einsum("WKGL,WKLH->WKGH", p.astype(dtype), v)
        sums = jnp.sum(p, axis=3, keepdims=True)
        return (mixed / jnp.where(sums == 0, 1.0, sums)).astype(dtype).reshape(q.shape)

    most = 1 if fixed else _most_tokens(args)
    return by_tiles(of_tile, (args.q, args.rows, args.lens, args.blocks), most)


def _gathered(args: SparseAttentionArgs) -> int:
    """The numbers of the keys of a token; it has as many of values."""
    (_, heads, count), width = args.blocks.shape, args.q.shape[2]
    return heads * count * args.block * width


def _most_tokens(args: SparseAttentionArgs) -> int:
    return TILE_BYTES // (8 * _gathered(args))


def workspace(args: SparseAttentionArgs) -> int:
    """A tile's keys and values as they are gathered and in the dtype of queries, and scores."""
    (tokens, heads, _), (_, _, count) = args.q.shape, args.blocks.shape
    of_token = 16 * _gathered(args) + 12 * heads * count * args.block
    return tile_width(tokens, _most_tokens(args)) * of_token
