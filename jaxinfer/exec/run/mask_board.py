"""The mask board: host memory from which a step that already runs reads its masks.

It is the inverse of the token board. ``docs/notes/0028-rows-with-masks.md`` has the measurements.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.cuda_driver import shared_zeros
from jaxinfer.exec.run.places import Places
from pallas_kernels.mask.board import NUMBER_WORDS, board_words, mask_words

NUM_STEPS = 2  # steps whose masks the board holds; at most two are in flight
MAX_NUMBER = 2**31 - 2  # even, as the next number after it is 1


class MaskBoard:
    """The masks of the last ``NUM_STEPS`` steps that wait for any, a row for each slot.

    A slot whose number belongs to an earlier step has no mask yet. ``memory`` is
    int32[NUM_STEPS, board_words(S, V)] of zeros.
    """

    def __init__(self, memory: np.ndarray, num_slots: int, vocab: int) -> None:
        first, words = num_slots * NUMBER_WORDS, mask_words(vocab)
        self._numbers = memory[:, :first:NUMBER_WORDS]
        bits = memory[:, first : first + num_slots * words].view(np.uint32)
        self._masks = bits.reshape(len(memory), num_slots, words)
        self._order = threading.Lock()
        self._order.acquire()
        # the places of steps' masks for the op ``mask``
        self.next_place = Places(memory, MAX_NUMBER).next

    @classmethod
    def of_program(cls, program: Program) -> MaskBoard | None:
        """A board for all slots; None if no step reads masks.

        Its memory is never freed, as an abandoned step may still read there. On a GPU without
        CUDA's driver no mask ever comes in time.
        """
        if not program.reads_masks:
            return None
        slots, vocab = program.limits.max_num_seqs + 1, program.model.config.vocab_size
        device: Any = program.placement.device
        shape, on_gpu = (NUM_STEPS, cdiv(board_words(slots, vocab), 2)), program.platform != "cpu"
        memory = shared_zeros(device.local_hardware_id, shape) if on_gpu else None
        if memory is None:
            memory = np.zeros(shape, np.int64)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        return cls(memory.view(np.int32), slots, vocab)

    def masks(self, number: int) -> np.ndarray:  # uint32[S, W]
        """The masks of the step with a number, by slot, to be written."""
        return self._masks[number % NUM_STEPS]

    def complete(self, number: int, slots: Sequence[int]) -> None:
        """Let the device read the masks of these slots; it may be waiting for them.

        The number is stored after the bits: x86 keeps the order of stores, and ARM between a lock
        that is released and one that is taken.
        """
        self._order.release()
        self._order.acquire()
        self._numbers[number % NUM_STEPS, slots] = number
