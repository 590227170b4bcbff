"""kv_append as one XLA scatter per pool; in place when the pools are donated."""

import jax


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """See ``kv_append.api``."""
    page, offset = slot_mapping // k_pages.shape[1], slot_mapping % k_pages.shape[1]

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[page, offset].set(new.astype(pages.dtype), mode="promise_in_bounds")

    return write(k_pages, k), write(v_pages, v)
