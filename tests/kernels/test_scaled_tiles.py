"""Tiles of records times factors: the code of a thread, which JAX's interpreter cannot run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kit.thread_values import Value, replace_mlir
from pallas_kernels.lib.quantised import Form, dequantised, in_form
from pallas_kernels.quantised_gemm.cases import random_matrix
from pallas_kernels.quantised_gemm.tiled import records, scaled_tiles
from pallas_kernels.quantised_gemm.tiled.arrange import TILE, arrange

THREADS, SUPER = 128, 256
ROUNDING = 2.0**-8 * (1 + 2.0**-8)  # of bfloat16, once, and of a super in float32
FORMS = {
    # name of a random matrix, its group, the form in which it is stored
    "q4_k": ("q4_k", 32, None),
    "q5_k": ("q5_k", 32, None),
    "q6_k": ("q6_k", 16, None),
    "long_groups": ("q4_k", 128, None),
    "one_form": ("q4_k", 32, Form("int8", 16, "int8", offsets=True, super_group=SUPER)),
}


@pytest.mark.parametrize(("name", "group", "form"), FORMS.values(), ids=FORMS)
def test_weights_are_rounded_once(
    name: str, group: int, form: Form | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_mlir(monkeypatch, scaled_tiles)
    by_rows = random_matrix(np.random.default_rng(3), name, TILE, SUPER, group, SUPER)
    by_rows = by_rows if form is None else in_form(by_rows, form)
    scales = np.asarray(by_rows.scales)
    scales[:, 1], scales[5] = np.iinfo(scales.dtype).max, 0  # also the largest and zero
    scales[:, 0] = np.iinfo(scales.dtype).min
    w = arrange(by_rows)
    assert w.recorded is not None
    kind, group = w.kind.removesuffix("_tiles"), w.recorded.group or 0
    words = w.values[0, 0, records.value_rows(w.recorded) :]  # [rows, 64]
    rows, signed = records.small_rows(group, SUPER), w.recorded.scale_dtype == "int8"
    expected = np.asarray(dequantised(by_rows), np.float64)
    magnitude = np.abs(expected)
    if w.recorded.offsets:  # float32, before the rounding
        offsets = np.asarray(by_rows.offsets, np.float64) * by_rows.supers[:, 0, 1:]
        magnitude = magnitude + 2.0**-14 * np.abs(np.repeat(offsets, group, axis=1))
    threads = np.arange(THREADS)
    tiles = np.ascontiguousarray(records.values_of(w)).reshape(SUPER // TILE, -1, THREADS, 16)
    for index, tile in enumerate(tiles):
        loaded = np.concatenate([part.view(np.int32) for part in tile], axis=1)
        own = [Value(np.ascontiguousarray(word)) for word in loaded.T]
        word, byte = divmod(index * TILE // group, 4)
        groups = range(byte, byte + max(1, TILE // group))
        for half in range(2):
            row = threads // 32 * 16 + threads % 32 // 4 + 8 * half
            places = (word, rows + word, -1) if w.recorded.offsets else (word,)
            factors = [Value(words[place][row]) for place in places]
            more = (half, groups)
            if w.recorded.offsets:
                found = scaled_tiles.float_weights(kind, own, factors, *more, signed=signed)
                unit = np.full(THREADS, scaled_tiles.UNIT)
            else:
                found = scaled_tiles.integer_weights(kind, own, factors[0], *more, signed=signed)
                unit = scaled_tiles.INTEGER_UNIT * by_rows.supers[row, 0, 0].astype(np.float64)
            for column, pair in enumerate(found):
                weights = pair.array.view(ml_dtypes.bfloat16).reshape(THREADS, 2)
                weights = weights.astype(np.float64) * unit[:, None]
                inputs = index * TILE + 8 * column + 2 * (threads % 4)[:, None] + np.arange(2)
                place = row[:, None], inputs
                error = np.abs(weights - expected[place])
                assert (error <= ROUNDING * magnitude[place]).all()
