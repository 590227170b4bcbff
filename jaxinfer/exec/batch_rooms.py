"""Rooms on a GPU that batches are copied into while the step before still runs.

Owns: ``BatchRooms``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxinfer.exec.cuda_driver import copies_to

ROOMS = 3  # of a size: two steps are in flight, and an array is ready up to 1 ms after its step


def room_sizes(batch_sizes: Iterable[int]) -> list[int]:
    """Bytes of each room once batches of these numbers of int32 values were all met."""
    return [4 * size for size in sorted(set(batch_sizes)) for _ in range(ROOMS)]


class BatchRooms:
    """Arrays that stay, whose content is replaced.

    A batch handed to a step as a NumPy array is copied by XLA: to new memory, which it takes to be
    free only when all earlier steps have ended. So between two steps a copy and two waits of one
    stream for another leave the device idle, 14 us of a step of 8 rows and more with the size of
    the page tables (H200). Here the copy is over before the step is launched.
    """

    def __init__(self, copy: Callable[[int, np.ndarray], None]) -> None:
        self._copy = copy  # to an address of the device; done when it returns
        self._rooms: dict[int, deque[jax.Array]] = {}  # by size, the one filled longest ago first
        self._readers: dict[int, jax.Array] = {}  # by id of a room: a result of the step

    @classmethod
    def of_device(cls, device: Any) -> BatchRooms | None:
        """On a ``jax.Device``; None unless it is CUDA's."""
        copy = copies_to(device.local_hardware_id) if device.platform == "gpu" else None
        return None if copy is None else cls(copy)

    def filled(self, batch: np.ndarray) -> jax.Array:  # int32[...]
        """A room with the batch in it, until ``ROOMS`` - 1 others of its size are filled."""
        if batch.size not in self._rooms:  # all at once: XLA's copy waits for the steps in flight
            made = [jax.device_put(np.zeros_like(batch)) for _ in range(ROOMS)]
            self._rooms[batch.size] = deque(jax.block_until_ready(made))
        rooms = self._rooms[batch.size]
        room = rooms[0]
        rooms.rotate(-1)
        if (result := self._readers.pop(id(room), None)) is not None:
            jax.block_until_ready(result)
        self._copy(room.unsafe_buffer_pointer(), batch)
        return room

    def read_by(self, result: jax.Array, room: jax.Array | np.ndarray) -> None:
        """A step reads the room: it is not filled anew before the step's result is there."""
        self._readers[id(room)] = result
