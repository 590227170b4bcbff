"""A few tokens as integers: the code of a warpgroup, which JAX's interpreter cannot run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kit.thread_values import Memory, Value, registers, replace_mlir
from pallas_kernels.lib.quantised import Form, Quantised, dequantised, in_form
from pallas_kernels.quantised_gemm.cases import random_matrix
from pallas_kernels.quantised_gemm.tiled import integers, records
from pallas_kernels.quantised_gemm.tiled.arrange import arrange
from pallas_kernels.quantised_gemm.tiled.integers import Factors, RecordedFactors

# of one matrix with Q4_K and Q6_K
MIXED = Form("int8", 16, "int8", offsets=True, super_group=256)
SPAN, TOKENS, THREADS = 512, 4, 128
CASES = {
    # form, group, super_group, inputs of a call, unit
    "q4_k": ("q4_k", 32, 256, 256, 128),
    "q4_k_parts": ("q4_k", 32, 256, 64, 64),
    "q5_k": ("q5_k", 32, 128, 128, 128),
    "q6_k": ("q6_k", 16, 256, 128, 128),
    "q6_k_of_64": ("q6_k", 16, 64, 64, 64),
    "mixed": ("mixed", 16, 256, 128, 128),
    "int4": ("int4", 128, 0, 256, 128),
    "int4_of_256": ("int4", 256, 0, 256, 128),
    "int4_zeros": ("int4_zeros", 32, 0, 128, 128),
    "int4_offsets": ("int4_offsets", 32, 0, 128, 128),
    "int8_offsets": ("int8_offsets", 16, 0, 64, 64),
}


def _rounded(x: np.ndarray, unit: int, chunk: int) -> tuple[np.ndarray, Memory, Memory, Memory]:
    """Tokens [4, 512] after rounding, and their bytes, units and totals in shared memory."""
    made = Memory(np.full((SPAN // chunk, 8, 4, chunk // 4), 99, np.int8))
    units = Memory(np.zeros((TOKENS, SPAN // unit), np.float32))
    totals = Memory(np.full((TOKENS, SPAN // chunk), 9999, np.int32))
    found = np.empty_like(x)
    for token in range(TOKENS):
        whole, factors = integers.whole_numbers(jnp.asarray(x[token].reshape(-1, unit)))
        values = np.asarray(whole, np.float32)
        assert np.abs(values).max() <= integers.LARGEST
        units.array[token] = factors
        register = Value(values.reshape(THREADS, 4))
        integers._store(register, made, Memory(totals.array[token]), token)
        found[token] = (values * np.asarray(factors)[:, None]).ravel()
    return found, made, units, totals


def _tiles(w: Quantised, inputs: int) -> list[Any]:
    """The tiles of 64 outputs as ``load_words`` loads them."""
    values = w.values if w.recorded is None else records.values_of(w)
    tiles = np.ascontiguousarray(values).view(np.uint8).reshape(inputs // 64, -1, THREADS, 16)
    return [registers([part.view(np.int32) for part in tile]) for tile in tiles]


def _table(w: Quantised, form: str, first: int, count: int) -> Any:
    """The factors of ``count`` groups from the group ``first`` on."""
    if w.recorded is None:
        kind = "int8" if form.startswith("int8") else "int4"
        parts = [None if part is None else part.reshape(-1, 64) for part in w.arrays[1:4]]
        refs = [
            Factors(*(None if part is None else Memory(part[i]) for part in parts))
            for i in range(first, first + count)
        ]
        return integers._Table(kind, refs)
    words = w.values[0, 0, records.value_rows(w.recorded) :]
    rows = records.small_rows(w.recorded.group, w.recorded.super_group)
    refs = [Memory(row) for row in words]
    own = slice(first // 4, first // 4 - (-count // 4))
    offsets = refs[rows : 2 * rows][own] if w.recorded.offsets else ()
    signed = w.recorded.scale_dtype == "int8"
    factors = RecordedFactors(count, signed, refs[:rows][own], offsets, refs[-1], None)
    shift = Value(np.full(THREADS, 8 * (first % 4), np.int32)) if first % 4 else None
    return integers._RecordedTable(factors, factors[2:5], shift)


@pytest.mark.parametrize(
    ("form", "group", "super_group", "inputs", "unit"), CASES.values(), ids=CASES
)
def test_products_of_a_warpgroup(
    form: str,
    group: int,
    super_group: int,
    inputs: int,
    unit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    replace_mlir(monkeypatch, integers)
    whole = super_group or inputs
    if form == "mixed":
        by_rows = in_form(random_matrix(rng, "q4_k", 64, whole, 32), MIXED)
    else:
        by_rows = random_matrix(rng, form, 64, whole, group, super_group or 256)
    w = arrange(by_rows)
    x = rng.normal(size=(TOKENS, SPAN)).astype(np.float32)
    x[1, 3], x[2, 64:] = 40.0, 0.0  # an outlier, and units of zeros
    chunk = 32 if group % 32 == 0 else 16
    rounded, made, units, totals = _rounded(x, unit, chunk)
    np.testing.assert_allclose(rounded, x, atol=40 / 60000)
    dense = np.asarray(dequantised(by_rows), np.float64)
    kind = "int4" if w.kind.startswith("int4") else "int8"
    for first in range(0, whole, inputs):  # also calls of a part of a record
        table = _table(w, form, first // group, max(1, inputs // group))
        chunks, own = (slice(first // n, (first + inputs) // n) for n in (chunk, unit))
        work = integers._Work(
            kind,
            table,
            Memory(made.array[chunks]),
            Memory(units.array[:, own]),
            Memory(totals.array[:, chunks]),
        )
        tiles = _tiles(w, whole)[first // 64 : (first + inputs) // 64]
        found = work.result(tiles)
        part = slice(first, first + inputs)
        expected = dense[:, part] @ rounded[:, part].T.astype(np.float64)  # [64, 4]
        threads = np.arange(THREADS)
        rows, token = threads // 32 * 16 + threads % 32 // 4, threads % 4
        for half, values in enumerate(found):
            own_rows = expected[rows + 8 * half, token]
            np.testing.assert_allclose(values.array, own_rows, rtol=2e-5, atol=2e-5)
