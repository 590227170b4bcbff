"""Staging buffers on a GPU: a batch is copied into one while the previous step still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.exec.compile.memory_plan import NUM_BUFFERS
from jaxinfer.exec.run.cuda_driver import Copy, copies_to
from jaxinfer.nn.placement import Placement


class BatchStaging:
    """Arrays on the device that are allocated once and overwritten by each batch.

    If a step gets its batch as a NumPy array, XLA copies it to new memory, which is usable only
    when all earlier steps have ended. Between two steps the device is then idle for a copy and two
    waits between streams: 14 us for 8 rows on an H200, and more with larger page tables. Here the
    copy ends before the step is launched.
    """

    def __init__(self, copies: Sequence[Copy], placement: Placement) -> None:
        self._copies = copies  # of each device; they wait for the copy
        self._placement = placement
        self._buffers: dict[int, deque[jax.Array]] = {}  # by size, oldest first
        self._addresses: dict[int, list[int]] = {}  # on each device, by id of a buffer
        self._readers: dict[int, jax.Array] = {}  # a result of the reading step, by id of a buffer

    @classmethod
    def of_placement(cls, placement: Placement) -> BatchStaging | None:
        """Staging buffers on the devices; None unless they are CUDA devices."""
        if placement.platform != "gpu":
            return None
        found = [copies_to(one.local_hardware_id, wait=True) for one in placement.own_devices]
        copies = [copy for copy in found if copy is not None]
        return cls(copies, placement) if len(copies) == len(found) else None

    def copy_in(self, batch: np.ndarray) -> jax.Array:  # int32[...]
        """Copy the batch into the next staging buffer of its size, on each device.

        It stays valid for ``NUM_BUFFERS`` - 1 further calls.
        """
        # allocate all buffers of a size together: XLA's copy waits for the steps in flight
        if batch.size not in self._buffers:
            made = [self._placement.put(np.zeros_like(batch)) for _ in range(NUM_BUFFERS)]
            self._buffers[batch.size] = deque(jax.block_until_ready(made))
            self._addresses |= {id(buffer): self._addresses_of(buffer) for buffer in made}
        buffers = self._buffers[batch.size]
        buffer = buffers[0]
        buffers.rotate(-1)
        if (result := self._readers.pop(id(buffer), None)) is not None:
            jax.block_until_ready(result)
        for copy, address in zip(self._copies, self._addresses[id(buffer)], strict=True):
            copy((address, batch))
        return buffer

    def _addresses_of(self, buffer: jax.Array) -> list[int]:
        """The memory of a buffer on each device of this host, in their order."""
        on = {shard.device: shard.data for shard in buffer.addressable_shards}
        return [on[device].unsafe_buffer_pointer() for device in self._placement.own_devices]

    def read_by(self, result: jax.Array, buffer: jax.Array | np.ndarray) -> None:
        """Record that a step reads this buffer: keep it until the step's ``result`` is ready."""
        self._readers[id(buffer)] = result
