"""An array on the devices that is filled piece by piece, so that the host holds a piece at a time.

Owns: ``StackedArray``.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding


class StackedArray:
    """An array that grows along its first dimension, in the memory that it keeps: each device
    receives its share of the pieces that its shard holds.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._shape = shape
        self._sharding = sharding
        self._held = sharding.addressable_devices_indices_map(shape)
        own = sharding.shard_shape(shape)
        self._shards = {device: jnp.zeros(own, dtype, device=device) for device in self._held}

    def set(self, index: int, piece: np.ndarray) -> None:  # [shape[1:]]
        """Copy a piece to its place; the piece is not needed any more when this returns."""
        for device, held in self._held.items():
            assert held is not None, "a shard without an index"
            pieces = range(self._shape[0])[held[0]]
            if index in pieces:
                part = jax.device_put(piece[held[1:]], device)
                at = np.int32(pieces.index(index))
                self._shards[device] = _with_piece(self._shards[device], part, at)
        jax.block_until_ready(list(self._shards.values()))

    def array(self) -> jax.Array:
        """All of it, when every piece is set."""
        shards = list(self._shards.values())
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


@partial(jax.jit, donate_argnums=0)
def _with_piece(array: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
    """In place: the array is donated."""
    return jax.lax.dynamic_update_index_in_dim(array, piece, index, axis=0)
