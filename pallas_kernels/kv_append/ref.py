"""The definition of kv_append: token by token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KvAppendArgs:
    """The arguments of ``kv_append``."""

    k: jax.Array  # [T, K, H]
    v: jax.Array  # [T, K, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    slot_mapping: jax.Array  # int32[T]


def kv_append(args: KvAppendArgs) -> tuple[jax.Array, jax.Array]:
    """Write token t to the slot that ``slot_mapping[t]`` names."""
    slots = args.slot_mapping
    return _written(args.k, args.k_pages, slots), _written(args.v, args.v_pages, slots)


def _written(values: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    written = np.array(pages)
    for slot, value in zip(slots, np.asarray(jnp.asarray(values, written.dtype)), strict=True):
        written[divmod(int(slot), written.shape[1])] = value
    return jnp.asarray(written)
