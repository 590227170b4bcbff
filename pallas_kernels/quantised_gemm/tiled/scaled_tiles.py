"""Tiles of records times their factors, as operands of wgmma in registers.

A tile's weights are rounded to bfloat16 once. Most instructions of a K step make them, so they are
made with as few as possible. Without offsets (Q6_K) a stored value and the scale of its group are
integers of 8 bits, both exact in bfloat16: one fused multiply-add of a pair of values subtracts the
middle and multiplies, and the products of a super's inputs are multiplied by it in float32. With
offsets (Q4_K, Q5_K) that would round the offset, too, so there a weight is one fused multiply-add
in float32: masked bits of a packed word are a subnormal float32, which a factor's exponent makes
normal. The results are divided by ``UNIT``, so that this exponent is in range.

For 128 inputs, 64 outputs and 64 tokens a thread has 293 instructions of Q4_K and 216 of Q6_K. They
were 347 and 376 when values became bfloat16 before they were scaled in float32; int4 with groups of
128 has 170 (sm_90a, CUDA 13.0).

JAX's interpreter cannot rename registers: tests replace ``times_integers`` and ``times_floats``,
and run the code of a thread by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.lib.quantised import MIDDLE, PACKED
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.fragments import assembly, element, load_words

type Ref = Any
type Value = Any  # of MLIR

COLUMNS = TILE // 8  # of registers; each has a pair of inputs
INTEGER_UNIT = 2.0**13  # by which ``times_integers`` divides
UNIT = 2.0**48  # by which ``times_floats`` divides
SUBNORMAL = 2.0**101  # UNIT times this is the inverse of the smallest float32
STORED_MIDDLE = 128  # of int8, see ``arrange``


def times_integers(
    kind: str,  # of the values: int4 or int8
    tile: Ref,
    scales: jax.Array,  # int32[64]: a byte for each group of the tile, from ``groups.start`` on
    groups: range,  # bytes
    *,
    signed: bool,
) -> jax.Array:  # bfloat16[64, 64]
    """A tile's values, of int4 minus 8, times their scales, divided by ``INTEGER_UNIT``."""

    def make(words: list[Value], row: list[Value], half: int) -> list[Value]:
        return integer_weights(kind, words, row[0], half, groups, signed=signed)

    return _tile(tile, [scales], make)


def times_floats(
    kind: str,  # of the values: int4 or int8
    tile: Ref,
    factors: Sequence[jax.Array],  # int32[64] each: scales and offsets, bytes as above, and supers
    groups: range,
    *,
    signed: bool,
) -> jax.Array:  # bfloat16[64, 64]
    """A tile's values times scales, plus offsets, divided by ``UNIT``."""

    def make(words: list[Value], row: list[Value], half: int) -> list[Value]:
        return float_weights(kind, words, row, half, groups, signed=signed)

    return _tile(tile, factors, make)


def _tile(
    tile: Ref,
    factors: Sequence[jax.Array],  # int32[64] each
    make: Callable[[list[Value], list[Value], int], list[Value]],
) -> jax.Array:
    """A tile of the pairs of weights that are made of a thread's words and the factors of its rows
    g and g + 8.
    """
    words = load_words(tile)
    row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED(words.shape, 4), *(row,) * len(factors)),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, loaded: Any, *arrays: Any) -> Any:
        own = [element(some, i) for some in loaded.registers.flat for i in range(4)]
        made = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
        flat = made.reshape(COLUMNS, 2)  # a view
        one, pair = ir.VectorType.get((1,), _i32()), ir.VectorType.get((2,), ir.BF16Type.get())
        for half in range(2):
            of_row = [element(array.registers.flat[half], 0) for array in arrays]
            for column, value in enumerate(make(own, of_row, half)):
                flat[column, half] = vector.bitcast(pair, vector.from_elements(one, [value]))
        return mgpu.FragmentedArray(_registers=made, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(words, *factors)


def integer_weights(
    kind: str, words: Sequence[Value], scales: Value, half: int, groups: range, *, signed: bool
) -> list[Value]:
    """A thread's pairs of weights of a row of ``times_integers``, column by column.

    A byte in the low bits of a bfloat16 is the integer times 2 ** -133 (``fragments.operand``), so
    a scale is multiplied by 2 ** 127, and then by 2 ** 126 for the values.
    """
    packed, factors = kind in PACKED, dict[int, tuple[Value, Value]]()
    middle = MIDDLE if packed else STORED_MIDDLE
    for first in groups[:2]:
        both = _bytes(scales, first)
        if signed:
            both = arith.xori(both, _int(0x00800080))  # plus 128
        both = _fma_pair(both, _both(2.0**127), _both(-2.0 if signed else -0.0))  # / 2 ** 6
        factor = 2.0 ** (122 if packed and half else 126)  # of 16 times the values
        multipliers = _fma_pair(both, _both(factor), _both(-0.0))
        minus = _fma_pair(both, _both(-middle / 2.0**7), _both(-0.0))
        for i, group in enumerate(groups[first - groups.start :: 2]):
            factors[group] = _splat(multipliers, i), _splat(minus, i)
    found = []
    for column in range(COLUMNS):
        multiplier, minus = factors[groups[column * len(groups) // COLUMNS]]
        if packed:
            pair = _and(_shifted(words[column // 2], 8 * (column % 2)), 0x000F000F << 4 * half)
        else:
            pair = _bytes(words[column], half)
        found.append(_fma_pair(pair, multiplier, minus))
    return found


def float_weights(
    kind: str,
    words: Sequence[Value],
    row: Sequence[Value],
    half: int,
    groups: range,
    *,
    signed: bool,
) -> list[Value]:
    """A thread's pairs of weights of a row of ``times_floats``, column by column.

    Bits of a word are a float32: the value times 2 to their place, divided by UNIT * SUBNORMAL.
    """
    scales, offsets, supers = row
    packed = kind in PACKED
    width = 4 if packed else 8
    large, minimum = (_half(supers, i) for i in range(2))
    normal = _times(large, SUBNORMAL / 2.0 ** (width * half))
    middle = _times(large, -STORED_MIDDLE / UNIT)
    minimum = _times(minimum, 1.0 / UNIT)
    factors = []
    for i in groups:
        scale, offset = _byte(scales, i, signed), _byte(offsets, i, signed)
        offset = arith.mulf(offset, minimum)
        if not packed:
            offset = _fma(scale, middle, offset)
        scale = arith.mulf(scale, normal)
        factors.append((scale, _times(scale, 2.0**-8), offset))
    found = []
    for column in range(COLUMNS):
        low, high, offset = factors[column * len(groups) // COLUMNS]
        word, second = (words[column // 2], column % 2) if packed else (words[column], 0)
        mask = (2**width - 1) << (width * half + 8 * second)
        bits = [arith.bitcast(_f32(), _and(_shifted(word, shift), mask)) for shift in (0, 16)]
        made = [_fma(each, high if second else low, offset) for each in bits]
        found.append(assembly("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", made[::-1], "i32"))
    return found


def _byte(words: Value, index: int, signed: bool) -> Value:
    """A byte of a word as float32."""
    if not signed:
        return arith.uitofp(_f32(), _and(_shifted(words, 8 * index), 0xFF))
    moved = arith.shli(words, _int(24 - 8 * index)) if index < 3 else words
    return arith.sitofp(_f32(), arith.shrsi(moved, _int(24)))


def _bytes(words: Value, first: int) -> Value:
    """A byte of a word and the next but one, if there is one, in the halves of a word."""
    selector = _int(0x4040 | min(first + 2, 4) << 8 | first)  # 4: zero
    return assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, _int(0), selector], "i32")


def _half(words: Value, index: int) -> Value:
    """A float16 of a word as float32."""
    pair, one = ir.VectorType.get((2,), ir.F16Type.get()), ir.VectorType.get((1,), _i32())
    halves = vector.bitcast(pair, vector.from_elements(one, [words]))
    return arith.extf(_f32(), element(halves, index))


def _both(value: float) -> Value:
    """A pair of equal bfloat16."""
    bits = int(np.array(value, jnp.bfloat16).view(np.uint16))
    return _int(int(np.array([bits, bits], np.uint16).view(np.int32)[0]))


def _splat(pair: Value, index: int) -> Value:
    """A pair of an element of a pair."""
    # Not prmt: ptxas reads a half as an operand of the fused multiply-add.
    one, two = (ir.VectorType.get((n,), ir.IntegerType.get_signless(32 // n)) for n in (1, 2))
    half = element(vector.bitcast(two, vector.from_elements(one, [pair])), index)
    return element(vector.bitcast(one, vector.from_elements(two, [half, half])), 0)


def _fma_pair(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of pairs of bfloat16, rounded once."""
    return assembly("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], "i32")


def _fma(a: Value, b: Value, c: Value) -> Value:
    return assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], "f32")


def _times(a: Value, factor: float) -> Value:
    return arith.mulf(a, mgpu.c(factor, _f32()))


def _shifted(words: Value, count: int) -> Value:
    return arith.shrui(words, _int(count)) if count else words


def _and(words: Value, mask: int) -> Value:
    return arith.andi(words, _int(mask))


def _int(value: int) -> Value:
    return mgpu.c(value, _i32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _f32() -> Any:
    return ir.F32Type.get()
