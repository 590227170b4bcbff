"""The definition of kv_append: token by token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.page_scales import Pools, appended, pools_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KvAppendArgs:
    """The arguments of ``kv_append``."""

    k: jax.Array  # [T, K, H]
    v: jax.Array  # [T, K, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    slot_mapping: jax.Array  # int32[T]
    k_scales: jax.Array | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: jax.Array | None = None  # float32[P, S, K]


def kv_append(args: KvAppendArgs) -> Pools:
    """Write token t to the slot that ``slot_mapping[t]`` names."""
    pools = pools_of(args)
    new = appended(jnp.asarray(args.k), jnp.asarray(args.v), pools)
    return tuple(_written(*pair, args.slot_mapping) for pair in zip(new, pools, strict=True))


def _written(values: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    written = np.array(pages)
    for slot, value in zip(slots, np.asarray(jnp.asarray(values, written.dtype)), strict=True):
        written[divmod(int(slot), written.shape[1])] = value
    return jnp.asarray(written)
