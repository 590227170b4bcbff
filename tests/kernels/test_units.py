"""units: copies of rows by the arrays' addresses, and the machine code for Hopper."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from kit.interpreted_process import interpreted
from pallas_kernels.units.api import pack, unpack
from pallas_kernels.units.layout import COLUMNS, PIECE_WORDS, UnitLayout

QWEN3_4B = UnitLayout((8192,) * 72)  # pages of 16 tokens
ODD = UnitLayout((15, 9, 3 * PIECE_WORDS + 2))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_copies_by_address() -> None:
    assert interpreted("kit.unit_copies") == [[True, True, 3, True]] * 3


def test_a_table_has_each_word_of_a_unit_once() -> None:
    for layout in (QWEN3_4B, ODD):
        table = layout.table([(1 << 40) + 256 * i for i in range(len(layout.row_words))])
        in_unit, sizes = table.reshape(-1, COLUMNS)[:, 4], table.reshape(-1, COLUMNS)[:, 5]
        assert in_unit.tolist() == [0, *sizes.cumsum()[:-1]]
        assert sizes.sum() == layout.unit_words and sizes.max() <= PIECE_WORDS
        assert set(table.reshape(-1, COLUMNS)[:, 1]) == {1 << 8}  # 2**40's upper half


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("layout", [QWEN3_4B, ODD], ids=["16_bytes", "words"])
def test_compiles_for_hopper(layout: UnitLayout) -> None:
    from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call

    def both(table: jax.Array, rows: jax.Array, array: jax.Array) -> object:
        block = pack(layout, table, rows, array)
        return unpack(layout, table, rows, block.reshape(-1), array)

    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        integers = jax.ShapeDtypeStruct((len(layout.pieces) * COLUMNS,), jnp.int32)
        rows = jax.ShapeDtypeStruct((29,), jnp.int32)
        jax.eval_shape(both, integers, rows, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16))
    assert len(recorder.calls) == 2
    for call in recorder.calls:
        code = compile_call(call)
        assert code.spilled_bytes == 0 and code.registers <= 64, code
