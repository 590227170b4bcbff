"""The definition of kv_append: one write after the other."""

import jax
import jax.numpy as jnp


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """Write token t to the slot that ``slot_mapping[t]`` names."""
    k_pages, v_pages = jnp.asarray(k_pages), jnp.asarray(v_pages)
    page_size = k_pages.shape[1]
    for token in range(k.shape[0]):
        page, offset = divmod(int(slot_mapping[token]), page_size)
        k_pages = k_pages.at[page, offset].set(k[token].astype(k_pages.dtype))
        v_pages = v_pages.at[page, offset].set(v[token].astype(v_pages.dtype))
    return k_pages, v_pages
