"""units: copy units to a block and from it, each by one kernel for all arrays.

A unit is the same row of several arrays: a page of the keys and values of all layers, say. In a
block the rows of a unit follow each other, and the units too.

Qwen3-4B has 72 arrays. XLA copies them by a kernel each: 64 MiB took 2 ms on an H200, 0.5 ms of
which were the host's, for launches and arguments. So the kernel finds the arrays by their
addresses, which are data, as in ``all_reduce``. XLA does not see what is read and written, but for
one of the arrays: it is an argument and a result, which puts a call in its place among the steps.
"""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import imported_when_called
from pallas_kernels.units.layout import UnitLayout

_pack = imported_when_called("pallas_kernels.units.triton", "pack")
_unpack = imported_when_called("pallas_kernels.units.triton", "unpack")


def pack(
    layout: UnitLayout,
    table: jax.Array,  # int32[pieces * COLUMNS]
    rows: jax.Array,  # int32[1 + W]: the number of units, then the row of each
    array: jax.Array,  # one of the arrays: the steps that write to it run before or after
) -> jax.Array:  # int32[W, unit_words]
    """A block with units from these rows; what follows them is undefined. Needs a GPU."""
    packed: jax.Array = _pack(layout, table, rows, array)
    return packed


def unpack(
    layout: UnitLayout,
    table: jax.Array,  # int32[pieces * COLUMNS]
    rows: jax.Array,  # int32[1 + W]
    block: jax.Array,  # int32[words], at least those of the units
    array: jax.Array,  # one of the arrays, donated
) -> tuple[jax.Array, jax.Array]:
    """Write the units of a block to these rows; no row occurs twice. Returns the array, and the
    number of units, int32[1], which is there when the block has been read. Needs a GPU.
    """
    same, count = _unpack(layout, table, rows, block, array)
    return same, count
