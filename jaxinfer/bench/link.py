"""The speed at which the device of an engine gets bytes from host memory, by plain copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxinfer import AsyncLLM

NUM_BYTES = 64 << 20  # of a copy: long enough for the link's full rate
NUM_COPIES = 8  # of a run, queued at once
NUM_RUNS = 4


def link_bytes_per_second(llm: AsyncLLM) -> float:
    """Bytes per second of the fastest run: on a GPU from locked memory, by a stream of its own; on
    a CPU, whose tier is ordinary memory, between two arrays.
    """
    import jax

    device = min(
        (device for leaf in jax.tree.leaves(llm.model.params) for device in leaf.devices()),
        key=lambda device: device.id,
    )
    if device.platform == "cpu":
        source, to = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
        return _rate(partial(_copy, source, to))
    from jaxinfer.exec.run.copy_stream import CudaCopyStream, HostCopy
    from jaxinfer.exec.run.cuda_driver import registered_memory

    memory = registered_memory(device.local_hardware_id, NUM_BYTES)
    array = jax.block_until_ready(jax.device_put(np.zeros(NUM_BYTES, np.uint8), device))
    stream = CudaCopyStream(device.local_hardware_id)
    copy = HostCopy(array.unsafe_buffer_pointer(), memory.ctypes.data, NUM_BYTES)

    def copied() -> None:
        stream.to_device([copy] * NUM_COPIES)
        stream.wait()

    return _rate(copied)


def _copy(source: np.ndarray, to: np.ndarray) -> None:
    for _ in range(NUM_COPIES):
        np.copyto(to, source)


def _rate(run: Callable[[], None]) -> float:
    seconds = math.inf
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        run()
        seconds = min(seconds, time.perf_counter() - start)
    return NUM_COPIES * NUM_BYTES / seconds
