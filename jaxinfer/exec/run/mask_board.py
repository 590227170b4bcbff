"""The mask board: host memory from which a GPU reads the masks of a step that already runs.

It is the inverse of the token board. ``docs/notes/0028-rows-with-masks.md`` has the measurements.
"""

from __future__ import annotations

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
        # the places of steps' masks for the op ``mask``
        self.next_place = Places(memory, MAX_NUMBER).next

    @classmethod
    def of_program(cls, program: Program) -> MaskBoard:
        """A board for all slots on a CUDA device.

        Without CUDA's driver its memory is the host's alone, so no mask ever comes in time.
        """
        slots, vocab = program.limits.max_num_seqs + 1, program.model.config.vocab_size
        device: Any = program.placement.device
        shape = (NUM_STEPS, cdiv(board_words(slots, vocab), 2))
        memory = shared_zeros(device.local_hardware_id, shape)
        if memory is None:
            memory = np.zeros(shape, np.int64)
        return cls(memory.view(np.int32), slots, vocab)

    def masks(self, number: int) -> np.ndarray:  # uint32[S, W]
        """The masks of the step with a number, by slot, to be written."""
        return self._masks[number % NUM_STEPS]

    def complete(self, number: int, slots: Sequence[int]) -> None:
        """Let the device read the masks of these slots; it may be waiting for them.

        The number is stored after the bits, and x86 keeps the order of stores.
        """
        self._numbers[number % NUM_STEPS, slots] = number
