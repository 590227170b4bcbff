"""Staging buffers on a GPU: a batch is copied into one while the previous step still runs."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import numpy as np

from jaxinfer.exec.compile.memory_plan import NUM_BUFFERS
from jaxinfer.exec.run.cuda_driver import Copy, copies_to


class BatchStaging:
    """Arrays on the device that are allocated once and overwritten by each batch.

    If a step gets its batch as a NumPy array, XLA copies it to new memory, which is usable only
    when all earlier steps have ended. Between two steps the device is then idle for a copy and two
    waits between streams: 14 us for 8 rows on an H200, and more with larger page tables. Here the
    copy ends before the step is launched.
    """

    def __init__(self, copy: Copy, device: Any) -> None:
        self._copy = copy  # waits for the copy
        self._device = device  # jax.Device
        self._buffers: dict[int, deque[jax.Array]] = {}  # by size, oldest first
        self._readers: dict[int, jax.Array] = {}  # a result of the reading step, by id of a buffer

    @classmethod
    def of_device(cls, device: Any) -> BatchStaging | None:
        """Staging buffers on a ``jax.Device``; None unless it is a CUDA device."""
        copy = copies_to(device.local_hardware_id, wait=True) if device.platform == "gpu" else None
        return None if copy is None else cls(copy, device)

    def copy_in(self, batch: np.ndarray) -> jax.Array:  # int32[...]
        """Copy the batch into the next staging buffer of its size.

        It stays valid for ``NUM_BUFFERS`` - 1 further calls.
        """
        # allocate all buffers of a size together: XLA's copy waits for the steps in flight
        if batch.size not in self._buffers:
            empty = [np.zeros_like(batch) for _ in range(NUM_BUFFERS)]
            made = jax.device_put(empty, self._device)
            self._buffers[batch.size] = deque(jax.block_until_ready(made))
        buffers = self._buffers[batch.size]
        buffer = buffers[0]
        buffers.rotate(-1)
        if (result := self._readers.pop(id(buffer), None)) is not None:
            jax.block_until_ready(result)
        self._copy((buffer.unsafe_buffer_pointer(), batch))
        return buffer

    def read_by(self, result: jax.Array, buffer: jax.Array | np.ndarray) -> None:
        """Record that a step reads this buffer: keep it until the step's ``result`` is ready."""
        self._readers[id(buffer)] = result
