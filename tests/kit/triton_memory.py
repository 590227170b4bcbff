"""Checks that a launch in Triton's interpreter accesses only its own arrays.

On a GPU an access beyond an array mostly reaches another array of the process, and stays unnoticed
until an allocator leaves a hole there. Here it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import TensorHandle, interpreter_builder

ALIGN = 256  # bytes, as the alignment of XLA's arrays
MIN_GAP = 1 << 20  # bytes


class OutsideOfArrays(AssertionError):
    """An access that is not within one of the launch's arrays."""


class LaunchMemory:
    """Copies of a kernel's arrays in separate memory, with large gaps between them.

    A gap is as large as the largest array, so that an index twice as large as it should be is in no
    other array. Gaps are not accessed, so they take no physical memory.
    """

    def __init__(self, kernel: str, arrays: Mapping[str, np.ndarray]) -> None:
        self._kernel = kernel
        self._names = tuple(arrays)
        gap = max(MIN_GAP, *(array.nbytes for array in arrays.values()))
        steps = [-(-(array.nbytes + gap) // ALIGN) * ALIGN for array in arrays.values()]
        memory = np.empty(gap + sum(steps) + ALIGN, np.uint8)
        first = memory.ctypes.data + gap
        base = -(-first // ALIGN) * ALIGN
        self._starts = base + np.cumsum([0, *steps[:-1]])  # addresses
        self.arrays: list[np.ndarray] = []
        for array, start in zip(arrays.values(), self._starts - memory.ctypes.data, strict=True):
            copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            copy[...] = array
            self.arrays.append(copy)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Within the context, an access of the interpreter outside the arrays raises."""
        builder = interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store
        swap, update = builder.create_atomic_cas, builder.create_atomic_rmw

        def checked_load(at: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
            self._check("loads", at, mask.data)
            return load(at, mask, *rest)

        def checked_store(at: TensorHandle, value: Any, mask: TensorHandle, *rest: Any) -> None:
            self._check("stores", at, mask.data)
            store(at, value, mask, *rest)

        def checked_swap(at: TensorHandle, *rest: Any) -> TensorHandle:
            self._check("swaps", at, np.True_)
            return swap(at, *rest)

        def checked_update(
            how: Any, at: TensorHandle, value: Any, mask: TensorHandle, *rest: Any
        ) -> TensorHandle:
            self._check("updates", at, mask.data)
            return update(how, at, value, mask, *rest)

        with (
            patch.object(builder, "create_masked_load", checked_load),
            patch.object(builder, "create_masked_store", checked_store),
            patch.object(builder, "create_atomic_cas", checked_swap),
            patch.object(builder, "create_atomic_rmw", checked_update),
        ):
            yield

    def _check(self, verb: str, pointers: TensorHandle, mask: Any) -> None:
        """Check that all unmasked lanes are in the same array."""
        active = np.broadcast_to(mask, pointers.data.shape).astype(bool)
        at = pointers.data[active].astype(np.int64)
        if not at.size:
            return
        item = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lowest, highest = int(at.min()), int(at.max())
        owner = max(0, int(np.searchsorted(self._starts, lowest, "right")) - 1)
        start, size = int(self._starts[owner]), self.arrays[owner].nbytes
        if start <= lowest and highest + item <= start + size:
            return
        wrong = lowest if lowest < start or lowest + item > start + size else highest
        middles = self._starts + [array.nbytes // 2 for array in self.arrays]
        sizes = np.array([array.nbytes for array in self.arrays])
        near = int(np.argmin(np.abs(wrong - middles) - sizes // 2))
        raise OutsideOfArrays(
            f"{self._kernel} {verb} {self._names[near]}[{(wrong - self._starts[near]) // item}], "
            f"of {sizes[near] // item} elements, in program {interpreter_builder.grid_idx}"
        )
