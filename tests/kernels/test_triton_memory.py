"""In Triton's interpreter an access outside of an array is an error with the array and index."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from kit.triton_memory import LaunchMemory, OutsideOfArrays

ONES = np.ones(4, np.float32)


def _load(at: TensorHandle, mask: TensorHandle) -> Any:
    return interpreter_builder.create_masked_load(at, mask, None, None, None, False)


def _store(at: TensorHandle, mask: TensorHandle) -> Any:
    value = TensorHandle(np.full_like(at.data, 7, np.float32), tl.float32)
    return interpreter_builder.create_masked_store(at, value, mask, None, None)


def _update(at: TensorHandle, mask: TensorHandle) -> Any:
    value = TensorHandle(np.full_like(at.data, 6, np.float32), tl.float32)
    semantics = (ir.MEM_SEMANTIC.RELAXED, None)
    return interpreter_builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, at, value, mask, *semantics)


def _swap(at: TensorHandle, mask: TensorHandle) -> Any:
    del mask
    old, new = (TensorHandle(np.full_like(at.data, x, np.float32), tl.float32) for x in (1, 7))
    return interpreter_builder.create_atomic_cas(at, old, new, ir.MEM_SEMANTIC.RELAXED, None)


WRITES = {"stores": _store, "updates": _update, "swaps": _swap}
ACCESSES = {"loads": _load, **WRITES}


@pytest.fixture
def memory() -> Iterator[LaunchMemory]:
    memory = LaunchMemory("kernel", {"x": ONES, "y": ONES, "nothing": ONES[:0]})
    interpreter_builder.set_grid_dim(1, 2, 3)
    interpreter_builder.set_grid_idx(0, 1, 2)
    with memory.enforced():
        yield memory


def _call(access: Callable[..., Any], array: np.ndarray, *indices: int, mask: Any = True) -> Any:
    addresses = array.ctypes.data + 4 * np.array(indices, np.int64)
    lanes = np.broadcast_to(mask, addresses.shape)  # integers, as what compares integers makes
    at = TensorHandle(addresses.astype(np.uint64), tl.pointer_type(tl.float32))
    return access(at, TensorHandle(lanes.astype(np.int32), tl.int32))


@pytest.mark.parametrize("access", WRITES.values(), ids=WRITES)
def test_inside_an_access_is_as_it_was(access: Callable[..., Any], memory: LaunchMemory) -> None:
    _call(access, memory.arrays[1], 1, 3)
    assert memory.arrays[1].tolist() == [1, 7, 1, 7]
    assert _call(_load, memory.arrays[1], 0, 1).data.tolist() == [1, 7]
    assert ONES.sum() == 4


@pytest.mark.parametrize("index", [-1, 4, 10**6], ids=["before", "behind", "far"])
@pytest.mark.parametrize("verb", ACCESSES)
def test_outside_it_raises(verb: str, index: int, memory: LaunchMemory) -> None:
    x = memory.arrays[0]
    nearest = "y|nothing" if index > 10**5 else "x"
    problem = rf"kernel {verb} ({nearest})\[-?\d+\], of [04] elements, in program \(0, 1, 2\)"
    with pytest.raises(OutsideOfArrays, match=problem):
        _call(ACCESSES[verb], x, 0, index)
    assert x.tolist() == [1] * 4


def test_the_lanes_of_an_access_are_in_one_array(memory: LaunchMemory) -> None:
    x, y = memory.arrays[:2]
    with pytest.raises(OutsideOfArrays):
        _call(_load, x, 0, (y.ctypes.data - x.ctypes.data) // 4)


def test_masked_lanes_are_anywhere(memory: LaunchMemory) -> None:
    assert _call(_load, memory.arrays[0], 0, 9, -9, mask=[True, False, False]).data[0] == 1
    _call(_store, memory.arrays[0], 0, 9, -9, mask=[True, False, False])
    assert memory.arrays[0].tolist() == [7, 1, 1, 1]
