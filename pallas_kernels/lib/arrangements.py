"""The orders in which kernels read quantised matrices, other than by rows.

An arrangement divides a matrix into tiles: so many outputs, and the inputs of a block. A tile is
contiguous, and tiles are in the order [O / outputs, K / inputs]. Scales, zeros, offsets and supers
are in the order [O / outputs, groups, outputs], but scales of blocks of outputs stay by blocks.
Shapes and dtypes stay those of ``Form.arrays``, but for values in int8: they are stored as uint8,
plus 128. That inverts their highest bit; the one of fp8, the sign, is inverted too. A matrix with
supers in tiles is one array, see ``quantised_gemm/tiled/records.py``.

    lanes   for the native kernel of a CPU: 16 outputs, see ``native/src/kernel.h``
    tiles   for the Hopper kernels: 64 outputs, see ``quantised_gemm/tiled/arrange.py``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.quantised import (
    KINDS,
    PACKED,
    Form,
    Quantised,
    dequantised,
    kind_and_form,
    nibble_block,
)
from pallas_kernels.native.library import missing, pack_lanes, pack_tiles
from pallas_kernels.quantised_gemm.tiled import arrange as tiled
from pallas_kernels.quantised_gemm.tiled import records

_HIGHEST = 0x80  # XORed to an int8, it adds 128


def _no_pack(kind: str, values: np.ndarray) -> None:
    """The ``pack`` of an arrangement without a faster way."""


@dataclass(frozen=True)
class Arrangement:
    """An order of values.

    ``positions`` returns, for a kind, the place in its tile of each value of a tile
    [outputs, inputs]; two values of a packed kind share a byte, the one in the low half first.
    ``kinds`` are those that the kernel reads, ``stack_kinds`` further ones that it reads in stacks
    of matrices. ``pack`` is a faster way to order a matrix's values on the host; it returns None
    where it is not installed. ``on_device`` arranges a whole matrix in a trace. With ``records``
    matrices with supers are one array.
    """

    name: str
    outputs: int
    kinds: tuple[str, ...]
    positions: Callable[[str], np.ndarray]  # int32[outputs, inputs]
    pack: Callable[[str, np.ndarray], np.ndarray | None] = _no_pack
    on_device: Callable[[Quantised], Quantised] | None = None
    stack_kinds: tuple[str, ...] = ()
    records: bool = False

    @property
    def of_stacks(self) -> Arrangement:
        """The arrangement of stacks, in which more kinds fit."""
        return replace(self, kinds=self.kinds + self.stack_kinds)

    def fits(self, form: Form, num_outputs: int, num_inputs: int) -> bool:
        """True if a matrix of this form and size can be arranged."""
        blocks_fit = form.block_outputs == 1 or form.block_outputs % self.outputs == 0
        if form.kind not in self.kinds or not blocks_fit:
            return False
        if self.is_recorded(form) and not records.fits(form):
            return False
        inputs = self.positions(form.kind).shape[1]
        return num_outputs % self.outputs == 0 and num_inputs % inputs == 0

    def is_recorded(self, form: Form) -> bool:
        """True if a matrix of this form is one array of records."""
        return self.records and form.super_group is not None

    def arrays(
        self, form: Form, num_outputs: int, num_inputs: int
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """``Form.arrays`` of an arranged matrix."""
        kind = self.kind(form.kind)
        if self.is_recorded(form):
            name, shape, dtype = records.array_of(kind, form, num_outputs, num_inputs)
            return {name: (shape, dtype)}
        made = form.arrays(num_outputs, num_inputs)
        shape, dtype = made.pop(form.kind)
        return {kind: (shape, "uint8" if dtype == "int8" else dtype), **made}

    @property
    def is_on_device(self) -> bool:
        """True if weights are placed by rows first, as numpy would take too long to arrange them.

        A compilation for each shape of a matrix is then part of every start: 4 s for a model of
        1.5 B parameters on an H100, where the native library takes 0.3 s.
        """
        return self.on_device is not None and missing() is not None

    def kind(self, base: str) -> str:
        """The name of an arranged kind."""
        return f"{base}_{self.name}"

    def arrange(self, w: Quantised) -> Quantised:
        """A matrix, of numpy arrays by rows, in this order."""
        values = self.pack(w.kind, np.asarray(w.values))
        if values is None:
            values = self._ordered(w.kind, np.asarray(w.values))
        if w.kind == "fp8":
            values = values.view(w.values.dtype)
        if self.is_recorded(w.form):
            return records.recorded(replace(w, kind=self.kind(w.kind), values=values))

        def arranged(part: np.ndarray) -> np.ndarray:
            return self._by_tile(part) if len(part) == w.num_outputs else part

        rest = (None if part is None else arranged(np.asarray(part)) for part in w.arrays[1:])
        return Quantised(self.kind(w.kind), values, *rest)

    def _ordered(self, kind: str, values: np.ndarray) -> np.ndarray:
        """The definition of the order; ``values`` and the result have the shape of the array."""
        shape = values.shape
        if kind in PACKED:
            half = nibble_block(2 * shape[1]) // 2
            halves = values.reshape(shape[0], -1, 1, half)
            values = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(shape[0], -1)
        tiles = self._tiles(kind, values)
        order = np.argsort(self.positions(kind).ravel())
        values = np.ascontiguousarray(tiles.reshape(*tiles.shape[:2], -1)[..., order])
        if kind in PACKED:
            pairs = values.reshape(-1, 2)
            values = pairs[:, 0] | pairs[:, 1] << 4
        else:
            values = values.view(np.uint8) ^ np.uint8(_HIGHEST)
        return values.reshape(shape)

    def _tiles(self, kind: str, values: np.ndarray) -> np.ndarray:  # [O, K] -> [., ., outputs, in]
        inputs = self.positions(kind).shape[1]
        shape = (len(values) // self.outputs, self.outputs, -1, inputs)
        return values.reshape(shape).swapaxes(1, 2)

    def _by_tile(self, part: np.ndarray) -> np.ndarray:  # [O, ...] -> the same shape
        tiles = part.reshape(len(part) // self.outputs, self.outputs, *part.shape[1:])
        return np.ascontiguousarray(np.moveaxis(tiles, 1, -1)).reshape(part.shape)

    def rows(self, w: Quantised, ids: jax.Array) -> Quantised:  # int32[T]
        """The outputs ``ids`` of an arranged matrix, by rows; ids are clamped to the matrix."""
        table = self.positions(w.base)
        ids = jnp.clip(ids, 0, w.num_outputs - 1)
        tile, row = ids // self.outputs, ids % self.outputs
        inputs = np.arange(w.num_inputs, dtype=np.int32)
        block = tile[:, None] * (w.num_inputs // table.shape[1]) + inputs // table.shape[1]
        at = block * table.size + jnp.asarray(table)[row][:, inputs % table.shape[1]]  # [T, K]
        stored = partial(records.bytes_at, w) if w.recorded else w.values.reshape(-1).__getitem__
        if w.base in PACKED:
            nibbles = stored(at // 2) >> (4 * (at % 2)).astype(jnp.uint8) & 15
            values = _packed(nibbles)
        else:
            found = jax.lax.bitcast_convert_type(stored(at), jnp.uint8) ^ jnp.uint8(_HIGHEST)
            dtype = jnp.int8 if w.base == "int8" else w.values.dtype
            values = jax.lax.bitcast_convert_type(found, dtype)
        if w.recorded is not None:
            scales, offsets, supers = records.factors_at(w, ids)
            return Quantised(w.base, values, scales, None, offsets, supers)

        def taken(part: jax.Array) -> jax.Array:  # [T, ...]
            if len(part) < w.num_outputs:
                return part[ids // w.block_outputs]
            tiles = part.reshape(len(part) // self.outputs, *part.shape[1:], self.outputs)
            return jnp.moveaxis(tiles[tile], -1, 1)[jnp.arange(len(ids)), row]

        rest = (None if part is None else taken(part) for part in w.arrays[1:])
        return Quantised(w.base, values, *rest)

    def restore(self, w: Quantised) -> Quantised:
        """The inverse of ``arrange``, on the device."""
        return self.rows(w, jnp.arange(w.num_outputs, dtype=jnp.int32))


def _packed(nibbles: jax.Array) -> jax.Array:  # uint8[T, K] -> uint8[T, K / 2]
    """``quantised.pack_nibbles`` on the device."""
    half = nibble_block(nibbles.shape[1]) // 2
    pairs = nibbles.reshape(len(nibbles), -1, 2, half)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(nibbles), -1)


def _lane_positions(kind: str) -> np.ndarray:  # int32[16, 8 or 4]
    """Byte 4 * o + j of 64 bytes has input j of output o; with nibbles also input j + 4."""
    outputs = np.arange(16, dtype=np.int32)[:, None]
    inputs = np.arange(8 if kind in PACKED else 4, dtype=np.int32)
    byte = 4 * outputs + inputs % 4
    return 2 * byte + inputs // 4 if kind in PACKED else byte


@cache
def _tile_positions(kind: str) -> np.ndarray:  # int32[64, 64]
    """The inverse of the order of ``tiled.arrange``."""
    return np.argsort(_tile_order(kind)).astype(np.int32).reshape(tiled.TILE, tiled.TILE)


@cache
def _tile_order(kind: str) -> np.ndarray:  # int32[4096]
    return tiled.order_of_tile(kind).astype(np.int32)


def _pack_tiles(kind: str, values: np.ndarray) -> np.ndarray | None:
    return pack_tiles(kind, values, _tile_order(kind))


LANES = Arrangement("lanes", 16, KINDS, _lane_positions, pack_lanes)
TILES = Arrangement(
    "tiles",
    tiled.TILE,
    ("int4", "int8", "fp4"),
    _tile_positions,
    _pack_tiles,
    tiled.arrange,
    stack_kinds=("fp8",),  # other matrices in fp8 are read by rows, by ``quantised_gemm.fp8``
    records=True,
)
ARRANGEMENTS = (LANES, TILES)


def named(name: str | None) -> Arrangement | None:
    """The arrangement of this name; None for no name: by rows."""
    return next((one for one in ARRANGEMENTS if one.name == name), None)


def arrangement_of(kind: str) -> Arrangement | None:
    """The arrangement of an arranged kind, or of the name of its array; None for one by rows."""
    return named(kind_and_form(kind)[0].partition("_")[2])


def of_either_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation of a record with a matrix ``w`` by rows, for arranged ones too."""

    def call(args: Any) -> Any:
        w: Quantised = args.w
        arrangement = arrangement_of(w.kind)
        if arrangement is not None:
            w = tiled.restore(w) if arrangement is TILES else arrangement.restore(w)
        return function(replace(args, w=w))

    return call


def rows_of(w: Quantised, ids: jax.Array) -> jax.Array:  # int32[T] -> float32[T, K]
    """The weights of the outputs ``ids``, which are clamped to the matrix: rows of an embedding."""
    arrangement = arrangement_of(w.kind)
    if arrangement is not None:
        return dequantised(arrangement.rows(w, ids))
    if w.block_outputs > 1:  # each output that is taken gets its block's scales
        scales = jnp.take(w.scales, ids // w.block_outputs, axis=0, mode="clip")
        return dequantised(Quantised(w.kind, jnp.take(w.values, ids, axis=0, mode="clip"), scales))
    taken = (
        None if part is None else jnp.take(part, ids, axis=0, mode="clip") for part in w.arrays
    )
    return dequantised(Quantised(w.kind, *taken))
