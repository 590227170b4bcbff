"""latent_decode in plain XLA: row by row, blocks of entries under an online softmax.

As in ``append_decode.attend_xla`` a row's bits depend neither on the other rows nor on their
number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.xla import last_slots, written
from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.lib import softmax
from pallas_kernels.lib.latent_pages import appended, pools_of, read_block
from pallas_kernels.lib.softmax import SoftmaxState


@jax.jit  # one trace serves every layer
def latent_decode(args: LatentDecodeArgs) -> tuple[jax.Array, ...]:  # [B, N, C] and the pools
    """See ``latent_decode.api``."""
    page_size, rank = args.pages.shape[1], args.q_latent.shape[2]
    slots = last_slots(args.page_table, args.seq_lens, page_size)
    pools = pools_of(args)
    pairs = zip(pools, appended(args.entries, pools), strict=True)
    pools = jax.lax.optimization_barrier(tuple(written(to, x, slots) for to, x in pairs))
    block_pages = softmax.pages_per_block(page_size)
    block = block_pages * page_size
    table = jnp.pad(args.page_table, ((0, 0), (0, -args.page_table.shape[1] % block_pages)))
    queries = jnp.concatenate((args.q_latent, args.q_rope), axis=2).astype(jnp.float32) * args.scale

    def row_body(row: jax.Array, out: jax.Array) -> jax.Array:
        length, query = args.seq_lens[row], queries[row]  # query: [N, C + R]

        def block_body(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
            ids = jax.lax.dynamic_slice(table, (row, i * block_pages), (1, block_pages))[0]
            visible = i * block + jnp.arange(block) < length
            # 0 * NaN is NaN, and unwritten slots may hold NaN, so masked entries become 0.
            keys = jnp.where(visible[:, None], read_block(pools, ids), 0.0)
            scores = jnp.einsum("NC,SC->NS", query, keys, precision="highest")
            scores = jnp.where(visible, scores, -jnp.inf)
            m_ij, alpha, p = softmax.block_weights(state, scores, -1)
            pv = jnp.einsum("NS,SC->NC", p, keys[:, :rank], precision="highest")
            l_i = state.l_i * alpha + jnp.sum(p, axis=-1)
            return SoftmaxState(m_ij, l_i, state.acc * alpha[:, None] + pv)

        blocks = jax.lax.div(length + (block - 1), block)
        initial = softmax.init_state(query.shape[:1], rank)
        state = jax.lax.fori_loop(0, blocks, block_body, initial)
        result = softmax.attention_output(state).astype(out.dtype)
        return jax.lax.dynamic_update_index_in_dim(out, result, row, axis=0)

    out = jax.lax.fori_loop(0, len(args.seq_lens), row_body, jnp.zeros_like(args.q_latent))
    return out, *pools
