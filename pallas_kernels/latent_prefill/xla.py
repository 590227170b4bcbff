"""latent_prefill in plain XLA: blocks of a row's context, each expanded once for all its queries.

The state of the online softmax of all queries is kept between blocks, so a block's latents are
expanded once for each chunk, as with one pass for each earlier chunk whose results are merged by
their log-sum-exp. The numbers of blocks and tiles are data, not shapes, as in
``paged_prefill.xla``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib import softmax
from pallas_kernels.lib.latent_pages import pools_of, read_block
from pallas_kernels.lib.softmax import SoftmaxState

QUERIES_PER_TILE = 64


@jax.jit  # one trace serves every layer
def latent_prefill(args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """See ``latent_prefill.api``."""
    (t, n, _), rank, starts = args.q.shape, args.k_up.shape[1], args.query_start_loc
    width = min(QUERIES_PER_TILE, t)
    block_pages = softmax.pages_per_block(args.pages.shape[1])
    block = block_pages * args.pages.shape[1]
    table = jnp.pad(args.page_table, ((0, 0), (0, -args.page_table.shape[1] % block_pages)))
    queries = jnp.pad(args.q.astype(jnp.float32) * args.scale, ((0, width), (0, 0), (0, 0)))
    k_heads, v_heads = (w.astype(jnp.float32).reshape(n, -1, rank) for w in (args.k_up, args.v_up))

    def row_body(row: jax.Array, state: SoftmaxState) -> SoftmaxState:
        start, count = starts[row], starts[row + 1] - starts[row]
        length, position = args.seq_lens[row], args.seq_lens[row] - count  # of the first query

        def block_body(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
            ids = jax.lax.dynamic_slice(table, (row, i * block_pages), (1, block_pages))[0]
            key = i * block + jnp.arange(block)
            # 0 * NaN is NaN, and unwritten slots may hold NaN, so masked entries become 0.
            entries = jnp.where((key < length)[:, None], read_block(pools_of(args), ids), 0.0)
            k, v = _expanded(entries, k_heads, v_heads)

            def tile_body(j: jax.Array, state: SoftmaxState) -> SoftmaxState:
                index = j * width + jnp.arange(width)
                visible = (key <= (position + index)[:, None]) & (index < count)[:, None]
                return _attend_tile(queries, k, v, visible, start + j * width, state)

            first = jax.lax.div(jnp.maximum(i * block - position, 0), width)
            tiles = jax.lax.div(count + (width - 1), width)
            return jax.lax.fori_loop(first, tiles, tile_body, state)

        blocks = jnp.where(count > 0, jax.lax.div(length + (block - 1), block), 0)
        return jax.lax.fori_loop(0, blocks, block_body, state)

    state = softmax.init_state((t + width, n), v_heads.shape[1])
    state = jax.lax.fori_loop(0, len(args.seq_lens), row_body, state)
    return softmax.attention_output(state)[:t].astype(args.q.dtype)


def _expanded(
    entries: jax.Array,  # float32[block, C + R]
    k_heads: jax.Array,  # float32[N, D, C]
    v_heads: jax.Array,  # float32[N, V, C]
) -> tuple[jax.Array, jax.Array]:  # float32[block, N, D + R], float32[block, N, V]
    """The keys and values of a block of entries."""
    latents, k_rope = jnp.split(entries, (k_heads.shape[2],), axis=1)
    k_nope = jnp.einsum("SC,NDC->SND", latents, k_heads, precision="highest")
    v = jnp.einsum("SC,NVC->SNV", latents, v_heads, precision="highest")
    shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:2], k_rope.shape[1]))
    return jnp.concatenate((k_nope, shared), axis=2), v


def _attend_tile(
    queries: jax.Array,  # float32[T + width, N, D + R], scaled
    k: jax.Array,  # float32[block, N, D + R]
    v: jax.Array,  # float32[block, N, V]
    visible: jax.Array,  # bool[width, block]; no key for queries of another row
    token: jax.Array,  # the first query
    state: SoftmaxState,  # of all queries: [T + width, N, ...]
) -> SoftmaxState:
    """The state after a tile of queries has attended to a block. Queries without a visible key keep
    their state.
    """
    width = visible.shape[0]
    own = SoftmaxState(*(jax.lax.dynamic_slice_in_dim(x, token, width) for x in state))
    tile = jax.lax.dynamic_slice_in_dim(queries, token, width)
    scores = jnp.einsum("TND,SND->TNS", tile, k, precision="highest")
    m_ij, alpha, p = softmax.block_weights(own, jnp.where(visible[:, None], scores, -jnp.inf), -1)
    pv = jnp.einsum("TNS,SNV->TNV", p, v, precision="highest")
    l_i = own.l_i * alpha + jnp.sum(p, axis=-1)
    new = SoftmaxState(m_ij, l_i, own.acc * alpha[..., None] + pv)
    update = jax.lax.dynamic_update_slice_in_dim
    return SoftmaxState(*(update(x, y, token, axis=0) for x, y in zip(state, new, strict=True)))
