"""The definition of latent_decode: append the new entries, then attend to all of the context."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_decode.attend_ref import attend


def latent_decode(
    q_latent: jax.Array,  # [B, N, C]
    q_rope: jax.Array,  # [B, N, R]
    entries: jax.Array,  # [B, C + R]
    pages: jax.Array,  # [P, S, C + R]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # [B, N, C] and the pool
    """A row of length 0 is padding: its entry goes to page 0, which is never read.

    Keys and values are entries, so grouped-query attention with one kv head gives the result, and
    its last R components, sums of rotated keys, are not needed.
    """
    lens, page_size = np.asarray(seq_lens), pages.shape[1]
    last = np.maximum(lens - 1, 0)
    page = np.asarray(page_table)[np.arange(len(lens)), last // page_size]
    pool = np.array(pages)
    for row in np.flatnonzero(lens):
        pool[page[row], last[row] % page_size] = np.asarray(jnp.asarray(entries, pages.dtype))[row]
    queries = jnp.concatenate((jnp.asarray(q_latent), jnp.asarray(q_rope)), axis=-1)
    heads = jnp.asarray(pool)[:, :, None]  # [P, S, 1, C + R]
    out = attend(queries, heads, heads, page_table, lens, scale=scale)
    return out[..., : q_latent.shape[-1]], jnp.asarray(pool)
