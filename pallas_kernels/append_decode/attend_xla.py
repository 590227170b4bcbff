"""Decode attention in plain XLA: row by row, blocks of keys under an online softmax.

Rows are computed one after the other: the work follows each row's length, a row's bits cannot
depend on the other rows, and a block stays in a core's cache, which on a CPU is several times
faster than a loop over all rows at once (docs/notes/0017-cpu-backend.md). Scores and sums are
written as multiply and reduce, which XLA fuses on a CPU without transposing the block first.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.lib import softmax
from pallas_kernels.lib.page_scales import Pools
from pallas_kernels.lib.softmax import SoftmaxState


@partial(
    jax.jit, static_argnames=("scale", "window", "cap", "root")
)  # one trace serves every layer
def attend(
    q: jax.Array,  # [B, N, H]
    pools: Pools,  # [P, S, K, H] each; scales float32[P, S, K]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    sinks: jax.Array | None = None,  # [N], with values [B, N]
    slopes: jax.Array | None = None,  # float32[N]
    sink_values: jax.Array | None = None,  # [B, N, H]
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    root: bool = False,
) -> jax.Array:  # [B, N, H]
    """See ``attend_ref``; a row's bits depend neither on the other rows nor on their number."""
    b, n, h = q.shape
    (page_size, num_kv_heads), scales = pools[0].shape[1:3], pools[2:] or (None, None)
    block_pages = softmax.pages_per_block(page_size)
    block = block_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    by_head = None if slopes is None else slopes.reshape(num_kv_heads, -1)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, (b, n)).reshape(b, num_kv_heads, -1)
    if sink_values is not None:
        sink_values = sink_values.reshape(b, num_kv_heads, -1, h)
    grouped = (q.astype(jnp.float32) * scale).reshape(b, num_kv_heads, n // num_kv_heads, h)

    def row_body(row: jax.Array, out: jax.Array) -> jax.Array:
        length, query = seq_lens[row], grouped[row]  # query: [K, G, H]
        oldest = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)

        def block_body(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
            ids = jax.lax.dynamic_slice(table, (row, i * block_pages), (1, block_pages))[0]
            position = i * block + jnp.arange(block)
            visible = ((position >= oldest) & (position < length))[:, None, None]
            k = softmax.read_block(pools[0], ids, scales[0])
            scores = jnp.sum(k[:, :, None] * query, axis=-1)  # [block, K, G]
            distance = (length - 1 - position)[:, None, None]
            scores = softmax.biased(softmax.capped(scores, cap), by_head, distance, root=root)
            scores = jnp.where(visible, scores, -jnp.inf)
            m_ij, alpha, p = softmax.block_weights(state, scores, 0)
            # 0 * NaN is NaN, and unwritten slots may hold NaN, so masked values become 0.
            v = softmax.read_block(pools[1], ids, scales[1])
            v = jnp.where(visible, v, 0.0)
            pv = jnp.sum(p[..., None] * v[:, :, None], axis=0)
            l_i = state.l_i * alpha + jnp.sum(p, axis=0)
            return SoftmaxState(m_ij, l_i, state.acc * alpha[..., None] + pv)

        blocks = (jax.lax.div(oldest, block), jax.lax.div(length + (block - 1), block))
        own = [None if one is None else one[row] for one in (sinks, sink_values)]
        state = softmax.init_state(query.shape[:2], h, *own)
        state = jax.lax.fori_loop(*blocks, block_body, state)
        result = jnp.where(length > 0, softmax.attention_output(state), 0.0)  # not of padding
        result = result.reshape(n, h).astype(q.dtype)
        return jax.lax.dynamic_update_index_in_dim(out, result, row, axis=0)

    return jax.lax.fori_loop(0, b, row_body, jnp.zeros_like(q))
