"""The definition of paged_prefill: every query is a decode at its own position."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_decode.ref import paged_decode


def paged_prefill(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [T, N, H]
    """Query i of a row with n queries and a context of s tokens sees s - n + i + 1 tokens."""
    table = np.zeros((q.shape[0], page_table.shape[1]), np.int32)
    seen = np.zeros(q.shape[0], np.int32)
    for row, length in enumerate(seq_lens):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        table[start:end] = page_table[row]
        seen[start:end] = int(length) - (end - start) + 1 + np.arange(end - start)
    out = paged_decode(q, k_pages, v_pages, table, seen, scale=scale, window=window)
    return jnp.asarray(out)
