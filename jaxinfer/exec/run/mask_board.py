"""The mask board: memory from which a step that already runs reads its masks.

It is the inverse of the token board. ``docs/notes/0028-rows-with-masks.md`` has the measurements.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.cuda_driver import Copy, copies_to, shared_zeros
from jaxinfer.exec.run.places import Places
from pallas_kernels.mask.board import board_words, mask_words

NUM_STEPS = 2  # steps whose masks the board holds; at most two are in flight
MAX_NUMBER = 2**31 - 2  # even, as the next number after it is 1


class MaskBoard:
    """The masks of the last ``NUM_STEPS`` steps that wait for any, a row for each slot.

    A slot whose number belongs to an earlier step has no mask yet. ``memory`` is
    int32[NUM_STEPS, board_words(S, V)] of zeros. A GPU reads a copy of it, at the ``address`` in
    its own memory: a kernel that reads 64 masks in host memory takes 0.06 ms longer.
    """

    def __init__(
        self,
        memory: np.ndarray,
        num_slots: int,
        vocab: int,
        address: int | None = None,  # the memory's own
        copy: Copy | None = None,  # does not wait
    ) -> None:
        words = mask_words(vocab)
        self._numbers = memory[:, :num_slots]
        bits = memory[:, num_slots : board_words(num_slots, vocab)].view(np.uint32)
        self._masks = bits.reshape(len(memory), num_slots, words)
        self._order = threading.Lock()
        self._order.acquire()
        address = address or memory.ctypes.data
        self._copy, self._offset = copy, address - memory.ctypes.data
        # the places of steps' masks for the op ``mask``
        self.next_place = Places(address, memory.strides[0], len(memory), MAX_NUMBER).next

    @classmethod
    def of_program(cls, program: Program) -> MaskBoard | None:
        """A board for all slots; None if no step reads masks, or without CUDA's driver.

        Its memory is never freed, as an abandoned step may still read there.
        """
        if not program.reads_masks:
            return None
        slots, vocab = program.limits.max_num_seqs + 1, program.model.config.vocab_size
        device: Any = program.placement.device
        shape = NUM_STEPS, cdiv(board_words(slots, vocab), 2)
        if program.platform == "cpu":
            _keep(zeros := np.zeros(shape, np.int64))
            return cls(zeros.view(np.int32), slots, vocab)
        shared = shared_zeros(device.local_hardware_id, shape)
        copy = copies_to(device.local_hardware_id, wait=False)
        if shared is None or copy is None:
            return None
        memory = shared.view(np.int32)
        _keep(on_device := jax.block_until_ready(jax.device_put(memory, device)))
        address = on_device.unsafe_buffer_pointer()  # type: ignore[attr-defined]
        return cls(memory, slots, vocab, address, copy)

    def masks(self, number: int) -> np.ndarray:  # uint32[S, W]
        """The masks of the step with a number, by slot, to be written."""
        return self._masks[number % NUM_STEPS]

    def complete(self, number: int, slots: Sequence[int]) -> None:
        """Let the device read the masks of these slots; it may be waiting for them.

        The number is stored after the bits: x86 keeps the order of stores, and ARM between a lock
        that is released and one that is taken. A GPU copies it after them.
        """
        self._order.release()
        self._order.acquire()
        numbers = self._numbers[number % NUM_STEPS]
        numbers[slots] = number
        if self._copy is not None and slots:
            bits = self.masks(number)[min(slots) : max(slots) + 1]
            self._copy(*((self._offset + one.ctypes.data, one) for one in (bits, numbers)))


def _keep(array: Any) -> None:
    """Never free the memory of an array."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
