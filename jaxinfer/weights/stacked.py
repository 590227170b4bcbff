"""An array on the devices that is filled piece by piece, so that the host holds one piece only."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.nn.placement import Axes, Placement, is_divided


class StackedArray:
    """An array that is allocated at once and set piece by piece along its first dimension.

    Each device has a part of every piece, or if the first dimension is divided a part of the
    pieces.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, placement: Placement, axes: Axes
    ) -> None:
        self._placement = placement
        self._axes = axes
        own = placement.sharding(axes).shard_shape(shape)
        by_piece = placement.num_devices > 1 and is_divided(axes[0])
        self._pieces = own[0] if by_piece else None  # of a device, if it has only some
        self._parts = {
            rank: jnp.zeros(own, dtype, device=placement.devices[rank])
            for rank in placement.own_ranks
        }

    def set(self, rank: int, index: int, part: np.ndarray | jax.Array) -> None:
        """Copy a device's part of piece ``index`` into the array; the caller may free it on
        return.
        """
        at = index if self._pieces is None else index - rank * self._pieces
        placed = jax.device_put(part, self._placement.devices[rank])
        self._parts[rank] = _with_piece(self._parts[rank], placed, np.int32(at))
        jax.block_until_ready(self._parts[rank])

    def array(self) -> jax.Array:
        """The whole array; call it when every piece is set."""
        return self._placement.of_parts(list(self._parts.values()), self._axes)


@partial(jax.jit, donate_argnums=0)
def _with_piece(array: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
    """Set a piece in place: the array is donated."""
    return jax.lax.dynamic_update_index_in_dim(array, piece, index, axis=0)
