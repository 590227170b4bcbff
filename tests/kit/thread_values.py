"""The code of a warpgroup that is written in MLIR, run at once on values of numpy.

``replace_mlir`` puts stand-ins for MLIR's dialects into a module, whose operations then compute:
a value is an array with an item for each of the 128 threads, so their registers are known, too.
Inline PTX is known by its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

THREADS, LANES = 128, 32


@dataclass(frozen=True)
class Type:
    """A type: a dtype, and of vectors a length."""

    dtype: np.dtype
    shape: tuple[int, ...] = ()


class F32Type(Type):
    """The type of a float32 scalar."""


class IntegerType(Type):
    """The type of an integer scalar."""


@dataclass(frozen=True, eq=False)
class Value:
    """Values of all threads: [128], or of vectors [128, length]."""

    array: np.ndarray

    @property
    def type(self) -> Type:
        """The type of one thread's value."""
        dtype, shape = self.array.dtype, self.array.shape[1:]
        if shape:
            return Type(dtype, shape)
        return {"f": F32Type if dtype == np.float32 else Type}.get(dtype.kind, IntegerType)(dtype)


@dataclass(frozen=True, eq=False)
class Memory:
    """An array in shared memory."""

    array: np.ndarray

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(self.array.dtype, self.array.shape)


def registers(arrays: Sequence[np.ndarray]) -> Any:
    """A fragmented array with these registers of all threads."""
    found = np.empty(len(arrays), object)
    for i, array in enumerate(arrays):
        found[i] = Value(array)
    return SimpleNamespace(registers=found)


def replace_mlir(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let the module's MLIR compute with numpy until the end of the test."""
    threads = Value(np.arange(THREADS, dtype=np.int64))
    mgpu = SimpleNamespace(c=_constant, thread_idx=lambda: threads, memref_fold=_folded)
    ir = SimpleNamespace(
        IndexType=_type(np.int64),
        F32Type=F32Type,
        F16Type=_type(np.float16),
        IntegerType=IntegerType,
        VectorType=SimpleNamespace(get=lambda shape, own: Type(own.dtype, tuple(shape))),
    )
    F32Type.get = staticmethod(lambda: F32Type(np.dtype(np.float32)))  # type: ignore[attr-defined]
    IntegerType.get_signless = staticmethod(  # type: ignore[attr-defined]
        lambda bits: IntegerType(np.dtype(f"int{bits}"))
    )
    vector = SimpleNamespace(
        load=_load_vector,
        bitcast=lambda own, value: Value(value.array.view(own.dtype)),
        from_elements=lambda own, values: Value(np.stack([v.array for v in values], axis=1)),
        extract_strided_slice=lambda own, value, first, size, _: Value(
            value.array[:, first[0] : first[0] + size[0]]
        ),
    )
    memref = SimpleNamespace(load=lambda ref, at: Value(ref.array[at[0].array]), store=_store)
    monkeypatch.setattr(module, "mgpu", mgpu)
    monkeypatch.setattr(module, "ir", ir)
    monkeypatch.setattr(module, "arith", _arith())
    monkeypatch.setattr(module, "vector", vector)
    monkeypatch.setattr(module, "memref", memref, raising=False)
    monkeypatch.setattr(module, "element", lambda value, i: Value(value.array[:, i]))
    monkeypatch.setattr(module, "assembly", _assembly)
    monkeypatch.setattr(module, "_extracted", lambda struct, i: struct.results[i], raising=False)


def _type(dtype: Any) -> Any:
    return SimpleNamespace(get=lambda: Type(np.dtype(dtype)))


def _constant(value: float, own: Type) -> Value:
    made = np.full(THREADS, value, np.int64 if own.dtype.kind == "i" else own.dtype)
    return Value(made.astype(own.dtype))


def _folded(ref: Memory, first: int, count: int) -> Memory:
    shape = ref.array.shape
    folded = ref.array.reshape(*shape[:first], -1, *shape[first + count :])
    assert np.shares_memory(folded, ref.array), "a view"
    return Memory(folded)


def _load_vector(own: Type, ref: Memory, at: Sequence[Value], alignment: int) -> Value:
    *outer, first = (index.array for index in at)
    nbytes = own.dtype.itemsize * own.shape[0]
    assert (first * ref.array.itemsize % min(alignment, nbytes) == 0).all()
    return Value(
        ref.array[(*(i[:, None] for i in outer), first[:, None] + np.arange(own.shape[0]))]
    )


def _store(value: Value, ref: Memory, at: Sequence[Value]) -> None:
    ref.array[tuple(index.array for index in at)] = value.array


def _arith() -> Any:
    def binary(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
        def call(a: Value, b: Value, **_: Any) -> Value:
            assert a.array.dtype == b.array.dtype, (a.array.dtype, b.array.dtype)
            return Value(function(a.array, b.array).astype(a.array.dtype))

        return call

    def unsigned(array: np.ndarray) -> np.ndarray:
        return array.view(f"uint{8 * array.itemsize}")

    def converted(own: Type, value: Value) -> Value:
        return Value(value.array.astype(own.dtype))

    return SimpleNamespace(
        FastMathFlags=SimpleNamespace(contract=None),
        addi=binary(np.add),
        subi=binary(np.subtract),
        muli=binary(np.multiply),
        divui=binary(np.floor_divide),
        remui=binary(np.remainder),
        andi=binary(np.bitwise_and),
        xori=binary(np.bitwise_xor),
        shli=binary(np.left_shift),
        shrsi=binary(np.right_shift),
        shrui=binary(lambda a, b: (unsigned(a) >> unsigned(b)).view(a.dtype)),
        addf=binary(np.add),
        subf=binary(np.subtract),
        mulf=binary(np.multiply),
        negf=lambda a: Value(-a.array),
        sitofp=converted,
        uitofp=lambda own, value: Value(unsigned(value.array).astype(own.dtype)),
        extf=converted,
        trunci=converted,
        index_cast=converted,
        extui=lambda own, value: Value(unsigned(value.array).astype(own.dtype)),
        bitcast=lambda own, value: Value(value.array.view(own.dtype)),
    )


def _assembly(text: str, constraints: str, operands: Sequence[Value], result: str) -> Any:
    del constraints, result
    arrays = [value.array for value in operands]
    if text.startswith("prmt"):
        return Value(_permuted(*arrays))
    if found := re.match(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.s32\.([us])8\.s8\.s32", text):
        return _mma(int(found[1]), f"{found[2]}int8".removeprefix("s"), arrays)
    if found := re.match(r"shfl\.sync\.bfly\.b32 \$0, \$1, (\d+), 31,", text):
        return Value(arrays[0][np.arange(THREADS) ^ int(found[1])])
    if text.startswith("fma.rn.bf16x2"):
        return Value(_fma(*(array.view(ml_dtypes.bfloat16) for array in arrays)).view(np.int32))
    if text.startswith("fma.rn.f32"):
        return Value(_fma(*arrays))
    if text.startswith("cvt.rn.bf16x2.f32"):  # the first operand becomes the higher half
        pair = np.stack(arrays[::-1], axis=1).astype(ml_dtypes.bfloat16)
        return Value(pair.view(np.int32)[:, 0])
    raise NotImplementedError(text)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once."""
    wide = (each.astype(np.float64) for each in (a, b, c))
    return (next(wide) * next(wide) + next(wide)).astype(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32 in its default mode."""
    both = np.stack([a, b], axis=1).view(np.uint8)  # [128, 8]
    made = np.empty((THREADS, 4), np.uint8)
    for byte in range(4):
        chosen = selector >> 4 * byte & 15
        found = np.take_along_axis(both, (chosen & 7)[:, None].astype(np.int64), axis=1)[:, 0]
        made[:, byte] = np.where(chosen & 8, np.where(found & 128, 255, 0), found)
    return made.view(np.int32)[:, 0]


def _mma(depth: int, kind: str, arrays: Sequence[np.ndarray]) -> Any:
    """mma.m16n8k32 or k16 of bytes: "Matrix Fragments" of the PTX ISA."""
    blocks = depth // 16
    a, b, c = arrays[: 2 * blocks], arrays[2 * blocks : 3 * blocks], arrays[3 * blocks :]
    c = c if len(c) == 4 else [c[0]] * 4
    lanes = np.arange(LANES)
    found = [np.empty(THREADS, np.int32) for _ in range(4)]
    for first in range(0, THREADS, LANES):
        own = slice(first, first + LANES)
        left, right = np.zeros((16, depth), np.int64), np.zeros((depth, 8), np.int64)
        for i, register in enumerate(a):
            columns = 16 * (i // 2) + 4 * (lanes % 4)[:, None] + np.arange(4)
            left[(lanes // 4 + 8 * (i % 2))[:, None], columns] = _bytes(register[own], kind)
        for i, register in enumerate(b):
            rows = 16 * i + 4 * (lanes % 4)[:, None] + np.arange(4)
            right[rows, (lanes // 4)[:, None]] = _bytes(register[own])
        product = left @ right
        for i in range(4):
            places = lanes // 4 + 8 * (i // 2), 2 * (lanes % 4) + i % 2
            found[i][own] = product[places] + c[i][own]
    return SimpleNamespace(results=[Value(one) for one in found])


def _bytes(register: np.ndarray, kind: str = "int8") -> np.ndarray:
    return np.ascontiguousarray(register).view(kind).reshape(-1, 4)
