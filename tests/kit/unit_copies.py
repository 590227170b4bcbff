"""The Triton kernels of units on host memory: ``python -m kit.unit_copies``.

A process of its own, with TRITON_INTERPRET=1, as ``kit.triton_sweep``. The arrays are found by
their addresses and belong to no launch, so the check of accesses is off. Prints one JSON object:
for each kind of unit whether the block, the arrays after a copy back to other rows, and the count
are those that numpy gives.
"""

import json
from contextlib import nullcontext
from math import prod
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from kit.triton_memory import LaunchMemory
from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.units import triton
from pallas_kernels.units.layout import WORD, UnitLayout

# The shapes of rows, and their dtypes: with whole 16 bytes and without, of several pieces.
KINDS: tuple[tuple[tuple[tuple[int, ...], str], ...], ...] = (
    (((16, 2, 8), "bfloat16"), ((16, 2, 8), "bfloat16")),
    (((3, 5), "float32"), ((4, 9), "uint8"), ((2,), "float32")),
    (((9000,), "float32"), ((2, 8192), "bfloat16"), ((12,), "float32")),
)
NUM_ROWS, WIDTH, FROM, TO = 7, 5, (6, 0, 3), (2, 5, 4)


def words(array: np.ndarray) -> np.ndarray:  # int32[rows, words]
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8).view(WORD)


def numbered(rows: tuple[int, ...]) -> Any:
    return jnp.array([len(rows), *rows, *[-(10**6)] * (WIDTH - len(rows))], jnp.int32)


def main() -> None:
    """Copy units to a block and back to other rows."""
    found, rng = [], np.random.default_rng(0)
    for kind in KINDS:
        sizes = [(NUM_ROWS, prod(shape) * jnp.dtype(dtype).itemsize) for shape, dtype in kind]
        arrays = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        before = [words(array).copy() for array in arrays]
        layout = UnitLayout(tuple(own.shape[1] for own in before))
        table = jnp.asarray(layout.table([array.ctypes.data for array in arrays]))
        expected = np.concatenate([own[list(FROM)] for own in before], axis=1)
        after = [own.copy() for own in before]
        for own in after:
            own[list(TO)] = own[list(FROM)]
        ordered = jnp.zeros(3)
        with (
            patch.object(LaunchMemory, "enforced", lambda self: nullcontext()),
            in_place_of_triton_call(interpreted),
        ):
            block = np.asarray(triton.pack(layout, table, numbered(FROM), ordered))
            packed = block[: len(FROM)]
            same, count = triton.unpack(
                layout, table, numbered(TO), jnp.asarray(block.reshape(-1)), ordered
            )
            count.block_until_ready()
        right = [np.array_equal(words(one), own) for one, own in zip(arrays, after, strict=True)]
        found.append(
            [np.array_equal(packed, expected), all(right), int(count[0]), same.shape == (3,)]
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
