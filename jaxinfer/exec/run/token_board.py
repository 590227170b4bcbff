"""The token board: host memory to which a GPU writes tokens, so the host reads them without a call.

``docs/notes/0007-token-board.md`` has the measurements.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jaxinfer.exec.run.cuda_driver import shared_zeros
from jaxinfer.exec.run.places import Places

NUM_CALLS = 8  # calls whose tokens the board holds; two steps of up to two calls are in flight
MAX_NUMBER = 2**31 - 1  # the next number after it is 1
POLL_SECONDS = 2e-5  # for other threads between two polls; the system makes about 70 us of it


class TokenBoard:
    """The tokens of the last ``NUM_CALLS`` calls, each with the number of its call.

    An entry with another number belongs to an earlier call, so the token is not written yet.
    """

    def __init__(self, memory: np.ndarray) -> None:  # int64[NUM_CALLS, B], zeros
        self._memory = memory
        # the places of calls' tokens for ``publish``
        self.next_place = Places(memory.ctypes.data, memory.strides[0], NUM_CALLS, MAX_NUMBER).next

    @classmethod
    def of_device(cls, device: Any, rows: int) -> TokenBoard | None:
        """A board for calls of up to ``rows`` rows; None unless the ``jax.Device`` is CUDA's."""
        is_gpu, shape = device.platform == "gpu", (NUM_CALLS, rows)
        memory = shared_zeros(device.local_hardware_id, shape) if is_gpu else None
        return None if memory is None else cls(memory)

    def read(self, number: int, tokens: jax.Array) -> np.ndarray:  # int32[B]
        """Wait for the tokens of a call, and read them from the board or the result ``tokens``.

        They are only in ``tokens`` if the call was compiled without the kernel of ``publish``, or
        if ``NUM_CALLS`` calls were launched since. Reading the result of a failed call raises its
        exception.
        """
        entries = self._memory[number % NUM_CALLS, : tokens.size]
        while not (entries >> 32 == number).all():
            if tokens.is_ready():  # type: ignore[attr-defined]
                return np.asarray(tokens)
            time.sleep(POLL_SECONDS)
        return entries.astype(np.int32)  # the lower half
