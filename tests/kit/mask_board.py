"""Reads of mask's Triton kernel from host memory: ``python -m kit.mask_board``.

A process of its own, with TRITON_INTERPRET=1, as ``kit.triton_sweep``. The memory belongs to none
of the launch's arrays, so the check of accesses is off. Prints one JSON object: for each row the
allowed tokens and whether its mask came in time. A thread writes the last row's mask late.
"""

import json
import threading
import time
from contextlib import nullcontext
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from jaxinfer.exec.run.mask_board import MaskBoard
from kit.triton_memory import LaunchMemory
from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.mask import triton as kernel
from pallas_kernels.mask.board import board_words
from pallas_kernels.mask.ref import MaskArgs

VOCAB, SLOTS = 20_000, 6
WANTED = [1, 0, 1, 1]  # the second row has no mask, the third row's never comes
ALLOWED = {0: [0, 31, 32, 19_999], 3: [5, 8_192]}


def main() -> None:
    """Mask four rows in other slots, in the second step of a board."""
    board = MaskBoard(np.zeros((2, board_words(SLOTS, VOCAB)), np.int32), SLOTS, VOCAB)
    board.next_place()
    place = board.next_place()
    slots = [4, 0, 1, 5]

    def write(row: int) -> None:
        words = board.masks(place[-1])[slots[row]]
        words[:] = 0
        for token in ALLOWED[row]:
            words[token // 32] |= np.uint32(1 << token % 32)
        board.complete(place[-1], [slots[row]])

    write(0)

    def write_late() -> None:
        time.sleep(0.2)
        write(3)

    threading.Thread(target=write_late).start()
    logits = jnp.arange(4 * VOCAB, dtype=jnp.float32).reshape(4, VOCAB)
    with (
        patch.object(LaunchMemory, "enforced", lambda self: nullcontext()),
        patch.object(kernel, "MAX_READS", 3_000),
        in_place_of_triton_call(interpreted),
    ):
        args = MaskArgs(
            logits=logits,
            finite=jnp.ones(4, jnp.int32),
            wanted=jnp.array(WANTED, jnp.int32),
            slots=jnp.array(slots, jnp.int32),
            place=jnp.array(place, jnp.int32),
            num_slots=SLOTS,
        )
        masked, in_time = kernel.mask(args)
        found, same = np.asarray(masked), np.asarray(logits)
    kept = [np.flatnonzero(row > -np.inf).tolist() for row in found]
    assert (found[found > -np.inf] == same[found > -np.inf]).all()
    print(json.dumps([kept, in_time.tolist()]))


if __name__ == "__main__":
    main()
