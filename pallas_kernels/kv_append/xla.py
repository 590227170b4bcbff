"""kv_append as one XLA scatter per pool; in place when the pools are donated."""

import jax
import jax.numpy as jnp


@jax.jit  # one trace serves every layer of a step
def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """See ``kv_append.api``."""
    # Indexing a pool reshaped to [P * S, K, H] would be simpler, but makes XLA copy the whole pool.
    page_size = jnp.int32(k_pages.shape[1])
    page, offset = jax.lax.div(slot_mapping, page_size), jax.lax.rem(slot_mapping, page_size)

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[page, offset].set(new.astype(pages.dtype), mode="promise_in_bounds")

    # Without the barrier XLA may fuse the write into a reader, and then copies the pool for it.
    return jax.lax.optimization_barrier((write(k_pages, k), write(v_pages, v)))
