"""kv_append as one XLA scatter per pool; in place when the pools are donated."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.ref import KvAppendArgs


@jax.jit  # one trace serves every layer of a step
def kv_append(args: KvAppendArgs) -> tuple[jax.Array, jax.Array]:
    """See ``kv_append.api``."""
    slots = args.slot_mapping
    # Without the barrier XLA may fuse the write into a reader, and then copies the pool for it.
    pools = written(args.k_pages, args.k, slots), written(args.v_pages, args.v, slots)
    return jax.lax.optimization_barrier(pools)


def written(
    pages: jax.Array,  # [P, S, ...]
    new: jax.Array,  # [T, ...]
    slots: jax.Array,  # int32[T]
) -> jax.Array:  # [P, S, ...]
    """The pool with each token's values at its slot, in the pool's dtype."""
    # Indexing a pool reshaped to [P * S, ...] would be simpler, but makes XLA copy the whole pool.
    page_size = jnp.int32(pages.shape[1])
    page, offset = jax.lax.div(slots, page_size), jax.lax.rem(slots, page_size)
    return pages.at[page, offset].set(new.astype(pages.dtype), mode="promise_in_bounds")
