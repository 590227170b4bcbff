"""``UnitCalls``: a GPU's calls that copy units between the layers' arrays and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.exec.compile.program import NO_GRAPH, Program
from jaxinfer.exec.run.device_arrays import DeviceArrays
from jaxinfer.exec.tiers.mover import Pools
from pallas_kernels.units.api import pack, unpack
from pallas_kernels.units.layout import COLUMNS, WORD, UnitLayout


class UnitCalls(Protocol):
    """Calls among the steps. ``rows``: int32[1 + width], the number of units, then their rows."""

    def pack(self, pool: int | None, rows: np.ndarray) -> jax.Array:
        """A block with units of a pool: int32[width, words]."""
        ...

    def unpack(self, pool: int | None, rows: np.ndarray, block: jax.Array) -> jax.Array:
        """Write the units of a block (int32[words]) to rows; the result is ready when it was read.

        A row may occur twice with the same content.
        """
        ...

    def settle(self) -> None:
        """The arrays may be others from now on."""
        ...


class AddressedCalls:
    """``UnitCalls`` by the arrays' addresses (``pallas_kernels.units``).

    Steps replace the arrays in place, so their addresses stay until they are freed. A call has one
    array of its pool as an argument, and a load also as a result: so it runs after the steps that
    were launched before it, and before those after it.
    """

    def __init__(
        self,
        program: Program,
        arrays: DeviceArrays,
        pools: Pools,
        widths: Mapping[int | None, int],
        block_words: int,
    ) -> None:
        self._arrays, self._pools, self._placement = arrays, pools, program.placement
        self._layouts = {pool: layout_of(pools.given(pool)) for pool in pools.indices}
        self._tables: dict[int | None, jax.Array] = {}
        self._packs: dict[int | None, Any] = {}
        self._unpacks: dict[int | None, Any] = {}
        block, options = jax.ShapeDtypeStruct((block_words,), WORD), dict(NO_GRAPH)
        with program.placement.as_default():
            for pool, layout in self._layouts.items():
                array = pools.given(pool)[0]
                table = jax.ShapeDtypeStruct((len(layout.pieces) * COLUMNS,), np.int32)
                rows = jax.ShapeDtypeStruct((1 + widths[pool],), np.int32)
                packing = jax.jit(partial(pack, layout)).lower(table, rows, array)
                self._packs[pool] = packing.compile(options)
                unpacking = jax.jit(partial(unpack, layout), donate_argnums=(3,))
                lowered = unpacking.lower(table, rows, block, array)
                self._unpacks[pool] = lowered.compile(options)

    def pack(self, pool: int | None, rows: np.ndarray) -> jax.Array:
        """See ``UnitCalls``."""
        first = self._arrays.state[self._pools.indices[pool][0]]
        packed: jax.Array = self._packs[pool](self._table(pool), rows, first)
        return packed

    def unpack(self, pool: int | None, rows: np.ndarray, block: jax.Array) -> jax.Array:
        """See ``UnitCalls``."""
        index = self._pools.indices[pool][0]
        first = self._arrays.state[index]
        made, read = self._unpacks[pool](self._table(pool), rows, block, first)
        self._arrays.replace((index,), (made,))
        return read

    def settle(self) -> None:
        """See ``UnitCalls``."""
        self._tables.clear()

    def _table(self, pool: int | None) -> jax.Array:
        if pool not in self._tables:
            own = [self._arrays.state[i] for i in self._pools.indices[pool]]
            addresses = [array.unsafe_buffer_pointer() for array in jax.block_until_ready(own)]
            self._tables[pool] = self._placement.put(self._layouts[pool].table(addresses))
        return self._tables[pool]


def layout_of(arrays: Any) -> UnitLayout:
    """How the units of these arrays lie; each of their rows has whole words."""
    return UnitLayout(
        tuple(array.dtype.itemsize * prod(array.shape[1:]) // WORD.itemsize for array in arrays)
    )
