"""The definition of paged_decode: masked softmax attention over a row's whole page table."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnames=("scale", "window"))
def paged_decode(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [B, N, H]
    """Row by row in float32; keys and values that the query does not see count as zeros."""
    _, page_size, num_kv_heads, head_dim = k_pages.shape

    def attend(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, page_ids, length = row
        position = jnp.arange(page_ids.size * page_size)
        seen = position < length
        if window is not None:
            seen &= position >= length - window

        def read(pages: jax.Array) -> jax.Array:  # float32[keys, K, H]
            rows = pages.at[page_ids].get(mode="clip").reshape(-1, num_kv_heads, head_dim)
            return jnp.where(seen[:, None, None], rows.astype(jnp.float32), 0.0)

        grouped = query.astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        scores = jnp.einsum("KGH,SKH->KGS", grouped, read(k_pages), precision="highest") * scale
        weights = jax.nn.softmax(scores, axis=-1, where=seen)
        mixed = jnp.einsum("KGS,SKH->KGH", weights, read(v_pages), precision="highest")
        return jnp.where(length > 0, mixed.reshape(query.shape), 0.0).astype(q.dtype)

    return jax.lax.map(attend, (q, page_table, seq_lens))
