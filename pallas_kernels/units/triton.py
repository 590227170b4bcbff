"""units in Triton: a CTA copies a piece of a row, 16 bytes a thread and load."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.exchange_triton import words_of
from pallas_kernels.units.layout import COLUMNS, WORD, UnitLayout

TILE = 2048  # words of a CTA's loop
NUM_WARPS = 8
PAIRS = tl.constexpr(COLUMNS // 2)


class Piece(NamedTuple):
    """A piece of a row."""

    array: Any  # pointer to int32: where it begins in its array
    in_block: Any  # the word where it begins in a block
    words: Any


@triton.jit
def _piece(table, rows, piece, unit, unit_words, ALIGN: tl.constexpr):
    """A piece of a unit."""
    row = tl.load(rows + 1 + unit).to(tl.int64)
    entry = table + piece * PAIRS * 2
    place = row * tl.load(entry + 2) + tl.load(entry + 3)
    in_block = unit.to(tl.int64) * unit_words + tl.load(entry + 4)
    array = tl.multiple_of(words_of(table, piece * PAIRS) + place, 4 * ALIGN)  # bytes
    words = tl.multiple_of(tl.load(entry + 5), ALIGN)
    return Piece(array, tl.multiple_of(in_block, ALIGN), words)


@triton.jit
def _pack(
    table,  # int32[pieces * COLUMNS]
    rows,  # int32[1 + W]
    ordered,  # one of the arrays, which is not read here
    block,  # int32[W, unit_words]
    unit_words,
    ALIGN: tl.constexpr,  # words that divide all rows
    TILE: tl.constexpr,
):
    piece = tl.program_id(0)
    unit = tl.program_id(1)
    if unit < tl.load(rows):
        own = _piece(table, rows, piece, unit, unit_words, ALIGN)
        for start in range(0, own.words, TILE):
            word = start + tl.arange(0, TILE)
            inside = word < own.words
            values = tl.load(own.array + word, mask=inside)
            tl.store(block + own.in_block + word, values, mask=inside)


@triton.jit
def _unpack(
    table,  # int32[pieces * COLUMNS]
    rows,  # int32[1 + W]
    block,  # int32[words]
    ordered,  # one of the arrays, which is changed by its address
    count,  # int32[1]
    unit_words,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    piece = tl.program_id(0)
    unit = tl.program_id(1)
    units = tl.load(rows)
    if piece + unit == 0:
        tl.store(count, units)
    if unit < units:
        own = _piece(table, rows, piece, unit, unit_words, ALIGN)
        for start in range(0, own.words, TILE):
            word = start + tl.arange(0, TILE)
            inside = word < own.words
            values = tl.load(block + own.in_block + word, mask=inside)
            tl.store(own.array + word, values, mask=inside)


def pack(
    layout: UnitLayout, table: jax.Array, rows: jax.Array, array: jax.Array
) -> jax.Array:  # int32[W, unit_words]
    """See ``units.api``."""
    width = rows.size - 1
    block: jax.Array = jt.triton_call(
        table,
        rows,
        array,
        kernel=_pack,
        out_type=jax.ShapeDtypeStruct((width, layout.unit_words), WORD),
        **_launch(layout, width),
    )
    return block


def unpack(
    layout: UnitLayout, table: jax.Array, rows: jax.Array, block: jax.Array, array: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``units.api``."""
    ref = jax.new_ref(array)
    count: jax.Array = jt.triton_call(
        table,
        rows,
        block,
        ref,
        kernel=_unpack,
        out_type=jax.ShapeDtypeStruct((1,), "int32"),
        **_launch(layout, rows.size - 1),
    )
    return jax.freeze(ref), count


def _launch(layout: UnitLayout, width: int) -> dict[str, Any]:
    align = 4 if all(words % 4 == 0 for words in layout.row_words) else 1
    return {
        "grid": (len(layout.pieces), width),
        "num_warps": NUM_WARPS,
        "num_stages": 1,
        "unit_words": layout.unit_words,
        "ALIGN": align,
        "TILE": TILE,
    }
