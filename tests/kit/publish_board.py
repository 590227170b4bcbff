"""Memory writes of publish's Triton kernel: ``python -m kit.publish_board``.

A process of its own, with TRITON_INTERPRET=1, as ``kit.triton_sweep``. The memory belongs to none
of the launch's arrays, so the check of accesses is off. Prints one JSON object: the result, the
entries of two rows beyond the last, and the same of a call with address 0.
"""

import json
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from jaxinfer.exec.run.token_board import TokenBoard
from kit.triton_memory import LaunchMemory
from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.publish.ref import PublishArgs
from pallas_kernels.publish.triton import publish

TOKENS = [0, 7, 2**31 - 1, 151_935, 4]


def _args(place: Any) -> PublishArgs:
    return PublishArgs(tokens=jnp.array(TOKENS, jnp.int32), place=jnp.array(place, jnp.int32))


def main() -> None:
    """Publish five tokens as the second step of a board."""
    memory = np.zeros((4, len(TOKENS) + 2), np.int64)
    board = TokenBoard(memory)
    board.next_place()
    place = board.next_place()
    with (
        patch.object(LaunchMemory, "enforced", lambda self: nullcontext()),
        in_place_of_triton_call(interpreted),
    ):
        same = publish(_args(place))
        read = board.read(place[-1], same)
        first = memory.tolist()
        publish(_args((0, 0, 3))).block_until_ready()
    print(json.dumps([same.tolist(), read.tolist(), first, memory.tolist()]))


if __name__ == "__main__":
    main()
