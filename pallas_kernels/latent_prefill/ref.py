"""The definition of latent_prefill: attention over the expanded keys and values of all pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_prefill.ref import paged_prefill


def latent_prefill(
    q: jax.Array,  # [T, N, D + R]
    entries: jax.Array,  # [T, C + R]
    k_up: jax.Array,  # [N * D, C]
    v_up: jax.Array,  # [N * V, C]
    pages: jax.Array,  # [P, S, C + R]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
) -> jax.Array:  # [T, N, V]
    """The pages have this step's entries; padding with zeros makes keys and values equally wide."""
    del entries
    num_heads, rank = q.shape[1], k_up.shape[1]
    pool = jnp.asarray(pages, jnp.float32)
    latents, k_rope = pool[..., :rank], pool[..., rank:]

    def expanded(w: jax.Array) -> jax.Array:  # [P, S, N, width of a head]
        by_head = jnp.asarray(w, jnp.float32).reshape(num_heads, -1, rank)
        return jnp.einsum("PSC,NDC->PSND", latents, by_head, precision="highest")

    k_nope, v = expanded(k_up), expanded(v_up)
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    k, value_dim = jnp.concatenate((k_nope, shared), axis=-1), v.shape[-1]
    width = max(k.shape[-1], value_dim)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    context = (page_table, seq_lens, query_start_loc)
    out = paged_prefill(padded(jnp.asarray(q)), padded(k), padded(v), *context, scale=scale)
    return out[..., :value_dim]
