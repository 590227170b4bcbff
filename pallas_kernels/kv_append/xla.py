"""kv_append as one XLA scatter per pool; in place when the pools are donated."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.lib.page_scales import Pools, appended, pools_of


@jax.jit  # one trace serves every layer of a step
def kv_append(args: KvAppendArgs) -> Pools:
    """See ``kv_append.api``."""
    pools = pools_of(args)
    pairs = zip(pools, appended(args.k, args.v, pools), strict=True)
    # Without the barrier XLA may fuse the write into a reader, and then copies the pool for it.
    return jax.lax.optimization_barrier(
        tuple(written(pages, x, args.slot_mapping) for pages, x in pairs)
    )


def last_slots(
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    page_size: int,
) -> jax.Array:  # int32[B]
    """The slot of the last token of each row; of a row of length 0 it is slot 0."""
    last = jnp.maximum(seq_lens - 1, 0)
    page = jnp.take_along_axis(page_table, (last // page_size)[:, None], axis=1)[:, 0]
    return jnp.where(seq_lens > 0, page * page_size + last % page_size, 0)


def written(
    pages: jax.Array,  # [P, S, ...]
    new: jax.Array,  # [T, ...]
    slots: jax.Array,  # int32[T]
) -> jax.Array:  # [P, S, ...]
    """The pool with each token's values at its slot, in the pool's dtype; page 0 is not written.

    Where indices may be equal, XLA's kernel for GPUs writes values of less than 32 bits with a
    compare-and-swap of two or four of them, and those of one slot wait for each other. A layer of
    DeepSeek-V4 with 64 rows, 1,024 pieces in one slot of page 0, took 3.7 ms (H200), by its other
    kernels at most 0.3: a conclusion from XLA's source, not measured alone.
    """
    # Indexing a pool reshaped to [P * S, ...] would be simpler, but makes XLA copy the whole pool.
    page_size = jnp.int32(pages.shape[1])
    page, offset = jax.lax.div(slots, page_size), jax.lax.rem(slots, page_size)
    outside = len(pages) + jnp.arange(len(slots), dtype=jnp.int32)
    page = jnp.where(page == 0, outside, page)
    return pages.at[page, offset].set(new.astype(pages.dtype), mode="drop", unique_indices=True)
