"""The definition of paged_decode: softmax attention, one row after the other."""

import jax
import jax.numpy as jnp


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
    """Gather exactly the visible keys of each row and attend over them in float32."""
    page_size, num_kv_heads = k_pages.shape[1:3]
    out = jnp.zeros(q.shape, jnp.float32)
    for row, length in enumerate(int(n) for n in seq_lens):
        if length == 0:
            continue
        seen = jnp.arange(max(0, length - window) if window else 0, length)
        pages, offsets = jnp.asarray(page_table)[row, seen // page_size], seen % page_size
        k = jnp.asarray(k_pages)[pages, offsets].astype(jnp.float32)  # [seen, K, H]
        v = jnp.asarray(v_pages)[pages, offsets].astype(jnp.float32)
        grouped = jnp.asarray(q)[row].astype(jnp.float32).reshape(num_kv_heads, -1, q.shape[-1])
        scores = jnp.einsum("KGH,SKH->KGS", grouped, k, precision="highest") * scale
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("KGS,SKH->KGH", weights, v, precision="highest")
        out = out.at[row].set(mixed.reshape(q.shape[1:]))
    return out.astype(q.dtype)
