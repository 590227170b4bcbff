"""Tokens in memory that the host and a GPU share, so that nobody has to ask the device for them.

Owns: ``TokenBoard``: where a step is to write its tokens, and reading them there.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import jax
import numpy as np

from jaxinfer.exec.run.cuda_driver import shared_zeros

STEPS = 8  # calls whose tokens it holds; two steps are in flight, of two calls each at most
LAST_NUMBER = 2**31 - 1  # of a step; then they begin anew
PAUSE_SECONDS = 2e-5  # between two looks, for other threads; the system makes some 70 us of it


class TokenBoard:
    """Tokens of the last ``STEPS`` steps, each with the number of its step: what is from an earlier
    one, or not there yet, has another.
    """

    def __init__(self, memory: np.ndarray) -> None:  # int64[STEPS, B], zeros
        self._memory = memory
        self._numbers = cycle(range(1, LAST_NUMBER + 1))

    @classmethod
    def of_device(cls, device: Any, rows: int) -> TokenBoard | None:
        """One for steps of so many rows on a ``jax.Device``; None unless it is CUDA's."""
        if device.platform != "gpu":
            return None
        memory = shared_zeros(device.local_hardware_id, (STEPS, rows))
        return None if memory is None else cls(memory)

    def next_place(self) -> tuple[int, int, int]:
        """Where the next step's tokens go, as ``publish`` takes it. The last is its number."""
        number = next(self._numbers)
        address: int = self._memory[number % len(self._memory)].ctypes.data
        low, high = np.array([address], np.int64).view(np.int32).tolist()
        return low, high, number

    def read(self, number: int, tokens: jax.Array) -> np.ndarray:  # int32[B]
        """The tokens of a step, as soon as they are on the board, or in the array that it returns:
        of a step that failed, that is an error. (They are in the array alone when the step was
        compiled without ``publish``'s kernel, or others were launched since.)
        """
        entries = self._memory[number % len(self._memory), : tokens.size]
        while not (entries >> 32 == number).all():
            if tokens.is_ready():  # type: ignore[attr-defined]
                return np.asarray(tokens)
            time.sleep(PAUSE_SECONDS)
        return entries.astype(np.int32)  # the lower half
