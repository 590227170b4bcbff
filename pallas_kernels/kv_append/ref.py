"""The definition of kv_append: token by token."""

import jax
import jax.numpy as jnp
import numpy as np


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """Write token t to the slot that ``slot_mapping[t]`` names."""
    return _written(k, k_pages, slot_mapping), _written(v, v_pages, slot_mapping)


def _written(values: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    written = np.array(pages)
    for slot, value in zip(slots, np.asarray(jnp.asarray(values, written.dtype)), strict=True):
        written[divmod(int(slot), written.shape[1])] = value
    return jnp.asarray(written)
