"""An array on the devices that is filled piece by piece, so that the host holds one piece only."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding


class StackedArray:
    """An array that is allocated at once and set piece by piece along its first dimension.

    Each device receives its part of the pieces that its shard holds.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._shape = shape
        self._sharding = sharding
        self._indices = sharding.addressable_devices_indices_map(shape)
        own = sharding.shard_shape(shape)
        self._shards = {device: jnp.zeros(own, dtype, device=device) for device in self._indices}

    def set(self, index: int, piece: np.ndarray | jax.Array) -> None:  # [shape[1:]]
        """Copy piece ``index`` into the array; the caller may free the piece on return."""
        for device, slices in self._indices.items():
            assert slices is not None, "a shard without an index"
            pieces = range(self._shape[0])[slices[0]]
            if index in pieces:
                part = jax.device_put(piece[slices[1:]], device)
                at = np.int32(pieces.index(index))
                self._shards[device] = _with_piece(self._shards[device], part, at)
        jax.block_until_ready(list(self._shards.values()))

    def array(self) -> jax.Array:
        """The whole array; call it when every piece is set."""
        shards = list(self._shards.values())
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


@partial(jax.jit, donate_argnums=0)
def _with_piece(array: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
    """Set a piece in place: the array is donated."""
    return jax.lax.dynamic_update_index_in_dim(array, piece, index, axis=0)
