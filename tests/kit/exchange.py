"""all_reduce's Triton kernel among processes: ``python -m kit.exchange FILE RANK RANKS [alone]``.

Each process is a device, with TRITON_INTERPRET=1, as ``kit.triton_sweep``, and FILE is the memory
of all of them. Prints one JSON object: for each call the sum of the values, and whether all bits
are those of a sum in the order of the ranks. With ``alone`` no other device answers, and it prints
whether all is NaN, and the word that says so.
"""

import json
import mmap
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from kit.triton_memory import LaunchMemory
from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce import triton as kernel
from pallas_kernels.all_reduce.ref import AllReduceArgs, Peers

# (tokens, width, split-K partials): calls with few and with several CTAs alternate
CALLS = ((1, 40, 0), (5, 700, 3), (3, 1024, 0), (1, 40, 2), (2, 2048, 0), (5, 700, 0))


def partials_of(call: int, rank: int) -> np.ndarray:
    tokens, width, splits = CALLS[call]
    rng = np.random.default_rng(1000 * call + rank)
    shape = (splits, tokens, width) if splits else (tokens, width)
    return rng.standard_normal(shape).astype(np.float32)


def expected(call: int, ranks: int) -> np.ndarray:
    """The sum of the ranks in order, each of its partials in order."""
    total: Any = None
    for rank in range(ranks):
        given = partials_of(call, rank)
        own = np.zeros(given.shape[-2:], np.float32)
        for partial in given if given.ndim == 3 else given[None]:
            own = own + partial
        total = own if total is None else total + own
    return total


def main(path: str, rank: int, ranks: int, alone: bool) -> None:
    size = 4 * launch.words(ranks)
    with Path(path).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size * ranks), np.uint8)
    starts = [memory.ctypes.data + size * peer for peer in range(ranks)]
    peers = Peers(
        rank=jnp.array([rank], jnp.int32),
        addresses=jnp.array(np.array(starts, np.uint64).view(np.int32)),
    )
    found: list[Any] = []
    with (
        patch.object(LaunchMemory, "enforced", lambda self: nullcontext()),
        patch.object(kernel, "MAX_READS", 100 if alone else 10_000_000),
        in_place_of_triton_call(interpreted),
    ):
        for call in range(len(CALLS)):
            if (call + rank) % 3 == 0:
                time.sleep(0.05)  # now this device is late, now that one
            given = jnp.asarray(partials_of(call, rank))
            args = AllReduceArgs(partials=given, peers=peers, axis="tensor")
            total = np.asarray(kernel.all_reduce(args)).reshape(given.shape[-2:])
            if alone:
                own = memory[size * rank : size * (rank + 1)].view(np.int32)
                lost = int(own[launch.lost_word(ranks)])
                found.append([bool(np.isnan(total).all()), lost])
            else:
                same = np.array_equal(total, expected(call, ranks))
                found.append([float(total.sum()), same])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "alone" in sys.argv)
