"""The definition of paged_prefill: each query attends as a decode row of its own position."""

import jax
import jax.numpy as jnp

from pallas_kernels.append_decode.attend_ref import attend


def paged_prefill(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    sinks: jax.Array | None = None,  # [N]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [T, N, H]
    """The query i positions before its row's end sees all of the context but the last i tokens."""
    index = jnp.arange(q.shape[0])
    row = jnp.searchsorted(query_start_loc, index, side="right") - 1
    real = index < query_start_loc[-1]
    row = jnp.where(real, row, 0)
    before_end = jnp.asarray(query_start_loc)[row + 1] - 1 - index
    seen = jnp.where(real, jnp.asarray(seq_lens)[row] - before_end, 0)
    table = jnp.asarray(page_table)[row]
    return attend(q, k_pages, v_pages, table, seen, sinks, scale=scale, window=window)
