"""The order of a quantised matrix's values in which the Hopper kernel reads them.

The kernel multiplies tiles of 64 outputs and 64 inputs. A tile is contiguous, and within it the
values of one thread are: 16 bytes that it loads at once (two times 16 bytes of int8). They are the
operand A of four wgmma instructions (m64nNk16, Figure "WGMMA .m64nNk16 register fragment layout for
matrix A" of the PTX ISA). In it lane 4 * g + t of warp w holds of 16 inputs

    rows 16 * w + g and 16 * w + g + 8, inputs 2 * t, 2 * t + 1, 2 * t + 8 and 2 * t + 9

A 32-bit register holds two adjacent inputs in its halves. So a packed word holds the first inputs
of pairs in its low half, the second inputs in its high half; a shift and a mask give a register.

int8 is stored as uint8, plus 128, which inverts the highest bit of a byte. The highest bit of fp8,
the sign, is inverted too, so both need the same work; only the kernels of experts read fp8 in this
order. The other arrays are stored as [O / 64, groups, 64], but scales of blocks of outputs stay by
blocks. All shapes and other dtypes stay those of ``quantised.Form.arrays``; only the name of the
values changes. A matrix with supers is one array instead, see ``records``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pallas_kernels.lib.quantised import PACKED, Quantised
from pallas_kernels.quantised_gemm.tiled import records
from pallas_kernels.quantised_gemm.tiled.records import TILE

SUFFIX = "_tiles"
# The arranged kinds, and the kinds of their values.
KIND_OF = MappingProxyType({kind + SUFFIX: kind for kind in ("int4", "int8", "fp8", "fp4")})

# Axes of a tile: warp, half (row + 8), g; then of inputs: k16, pair (input + 8), t, element.
_SPLIT = (4, 2, 8, 4, 2, 4, 2)
_WARP, _HALF, _G, _K16, _PAIR, _T, _ELEMENT = range(7)
# Order in memory, slowest first; int4 has two values of one byte last.
_PACKED_ORDER = (_WARP, _G, _T, _K16, _ELEMENT, _PAIR, _HALF)
_BYTE_SPLIT = (4, 2, 8, 2, 2, 2, 4, 2)  # k16 is split: 16 bytes are of half of the inputs
_BYTE_ORDER = (3, _WARP, _G, 6, 4, 5, 7, _HALF)


def arrange(w: Quantised) -> Quantised:
    """A matrix in the kernel's order; also of JAX arrays, in a trace.

    numpy takes 10 ns for a byte of int4. Raises ValueError if tiles do not divide the matrix.
    """
    _check(w.num_outputs, w.num_inputs)
    values, shape = w.values, w.values.shape
    if w.kind in PACKED:
        halves = values.reshape(w.num_outputs, -1, 1, TILE // 2)
        unpacked = halves >> np.array([[0], [4]], np.uint8) & 15  # low bits: the first inputs
        pairs = _tiled(unpacked.reshape(w.num_outputs, -1), _SPLIT, _PACKED_ORDER)
        pairs = pairs.reshape(*shape, 2)
        values = pairs[..., 0] | pairs[..., 1] << 4
    else:
        inverted = values.view(np.uint8) ^ 128
        inverted = _tiled(inverted, _BYTE_SPLIT, _BYTE_ORDER).reshape(shape)
        values = inverted.view(values.dtype) if w.kind == "fp8" else inverted
    if w.supers is not None:
        return records.recorded(replace(w, kind=w.kind + SUFFIX, values=values))
    rest = (_moved(part, w.num_outputs, _by_tile) for part in w.arrays[1:])
    return Quantised(w.kind + SUFFIX, values, *rest)


def restore(w: Quantised) -> Quantised:
    """The inverse of ``arrange``; also of JAX arrays, in a trace."""
    kind, num_outputs = KIND_OF[w.kind], w.num_outputs
    values = w.values if w.recorded is None else records.values_of(w)
    shape = values.shape
    if kind in PACKED:
        pairs = values.reshape(-1, 1)
        shifts = np.array([0, 4], np.uint8)
        unpacked = _untiled(pairs >> shifts & 15, num_outputs, _SPLIT, _PACKED_ORDER)
        blocks = unpacked.reshape(num_outputs, -1, 2, TILE // 2)
        values = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(shape)
    else:
        inverted = _untiled(values.view(np.uint8), num_outputs, _BYTE_SPLIT, _BYTE_ORDER) ^ 128
        values = inverted.view(np.int8 if kind == "int8" else values.dtype)
    if w.recorded is not None:
        scales, offsets, supers = records.factors_of(w)
        return Quantised(kind, values, scales, None, offsets, supers)
    rest = (_moved(part, num_outputs, _by_output) for part in w.arrays[1:])
    return Quantised(kind, values, *rest)


def order_of_tile(kind: str) -> np.ndarray:  # int[4096]
    """The values of a tile [64, 64], counted row by row, in the order of memory."""
    values = np.arange(TILE * TILE).reshape(TILE, TILE)
    split = (_SPLIT, _PACKED_ORDER) if kind in PACKED else (_BYTE_SPLIT, _BYTE_ORDER)
    return _tiled(values, *split).ravel()


def _check(num_outputs: int, num_inputs: int) -> None:
    if num_outputs % TILE or num_inputs % TILE:
        raise ValueError(
            f"a matrix of {num_outputs} outputs and {num_inputs} inputs has no tiles of {TILE}"
        )


def _axes(split: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], list[int]]:
    """The shape [O / 64, rows..., K / 64, inputs...] and the axes of the arranged order."""
    axes = [axis + (1 if axis <= _G else 2) for axis in order]
    return (-1, *split[: _G + 1], 0, *split[_G + 1 :]), [0, _G + 2, *axes]


def _tiled(
    values: Any,  # [O, K]
    split: tuple[int, ...],
    order: tuple[int, ...],
) -> Any:
    shape, axes = _axes(split, order)
    shape = tuple(size or values.shape[1] // TILE for size in shape)
    return values.reshape(shape).transpose(axes)


def _untiled(
    values: Any, num_outputs: int, split: tuple[int, ...], order: tuple[int, ...]
) -> Any:  # [O, K]
    shape, axes = _axes(split, order)
    inner = values.size // num_outputs
    shape = tuple(size or inner // TILE for size in shape)
    shape = (num_outputs // TILE, *shape[1:])
    arranged = values.reshape([shape[axis] for axis in axes])
    return arranged.transpose(np.argsort(axes)).reshape(num_outputs, inner)


def _moved(part: Any, num_outputs: int, order: Callable[[Any], Any]) -> Any:
    """Factors of each output in an order; those of blocks of outputs as they are."""
    return part if part is None or len(part) < num_outputs else order(part)


def _by_tile(part: Any) -> Any:  # [O, ...] -> [O / 64, ..., 64] in the same shape
    tiles = part.reshape(part.shape[0] // TILE, TILE, -1)
    return tiles.swapaxes(1, 2).reshape(part.shape)


def _by_output(part: Any) -> Any:
    """The inverse of ``_by_tile``."""
    tiles = part.reshape(part.shape[0] // TILE, -1, TILE)
    return tiles.swapaxes(1, 2).reshape(part.shape)
