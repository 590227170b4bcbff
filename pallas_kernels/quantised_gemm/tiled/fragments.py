"""Packed values in registers, and the bfloat16 operands of wgmma that they become.

The registers of these arrays are renamed here, which Pallas itself cannot express. JAX's
interpreter cannot run that: tests replace ``load_words`` and ``fragment``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.quantised_gemm.tiled.arrange import TILE

type Ref = Any

THREADS = 128  # of a warpgroup
WORDS = 4  # that a thread loads at once: 16 bytes


def _strided(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), WORDS)


def load_words(tile: Ref) -> jax.Array:  # bytes or words in shared memory -> int32[words]
    """A tile's values, four consecutive words of each 16 bytes in a thread."""
    size = tile.dtype.itemsize
    count = int(np.prod(tile.shape)) * size // 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=_strided(count)),
    )
    def load(_: Any, smem: Any) -> Any:
        index, i32, byte = (
            ir.IndexType.get(),
            ir.IntegerType.get_signless(32),
            smem.type.element_type,
        )
        flat = mgpu.memref_fold(smem, 0, len(smem.type.shape))
        thread = arith.index_cast(index, mgpu.thread_idx())
        thread = arith.remui(thread, mgpu.c(THREADS, index))
        first = arith.muli(thread, mgpu.c(4 * WORDS // size, index))
        registers = np.empty(count // (WORDS * THREADS), dtype=object)
        for i in range(len(registers)):
            at = arith.addi(first, mgpu.c(4 * WORDS // size * THREADS * i, index))
            kind = ir.VectorType.get((4 * WORDS // size,), byte)
            found = vector.load(kind, flat, [at], alignment=16)
            registers[i] = vector.bitcast(ir.VectorType.get((WORDS,), i32), found)
        layout = mgpu.WGStridedFragLayout((count,), WORDS)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    run: Any = load  # without its first argument, the context
    return run(tile)


def fragment(
    words: Sequence[jax.Array],  # int32[...] each
    multipliers: Sequence[float],  # one for each array of words
    minus: jax.Array | float = 0.0,  # or bfloat16[64, 64]
) -> jax.Array:  # bfloat16[64, 64]
    """Operand A of wgmma for a tile: the halves of words as bfloat16, times a multiplier, minus
    ``minus``, rounded once.

    ``words`` are four arrays of 512, one for each register of a wgmma: word i of a thread belongs
    to wgmma i. Or they are two of 1024 for the rows and the rows + 8: words 2 i and 2 i + 1 of a
    thread belong to wgmma i.
    """
    count = words[0].shape[0]
    subtracted = [minus] if isinstance(minus, jax.Array) else []

    @plgpu.inline_mgpu(
        arg_types=(*(_strided(count),) * len(words), *(plgpu.Layout.WGMMA,) * len(subtracted)),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def rename(_: Any, *arrays: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))

        def constant(value: float) -> Any:
            return arith.constant(
                pair,
                ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(ir.BF16Type.get(), value)),
            )

        def register(column: int, half: int) -> tuple[Any, float]:
            """A register of the tile's columns / 8 and rows + 8, and its multiplier."""
            i = 2 * (column % 2) + half if len(words) == 4 else half
            word = column // 2 if len(words) == 4 else column
            loaded = arrays[i].registers.flat[word // WORDS]
            taken = vector.extract_strided_slice(one, loaded, [word % WORDS], [1], [1])
            return vector.bitcast(pair, taken), multipliers[i]

        shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE))
        registers = np.empty(shape, dtype=object)
        flat = registers.reshape(TILE // 8, 2)  # a view
        contract = arith.FastMathFlags.contract  # one instruction
        rows = arrays[-1].registers.reshape(TILE // 8, 2) if subtracted else None
        for column, half in np.ndindex(*flat.shape):
            value, multiplier = register(column, half)
            value = arith.mulf(value, constant(multiplier), fastmath=contract)
            if rows is not None:
                value = arith.subf(value, rows[column, half], fastmath=contract)
            elif isinstance(minus, float) and minus:
                value = arith.subf(value, constant(minus), fastmath=contract)
            flat[column, half] = value
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return rename(*words, *subtracted)


def scaled(
    weights: jax.Array,  # bfloat16[64, inputs]
    scale: jax.Array,  # float32 of that shape
    offset: jax.Array | None,  # of that shape, too
) -> jax.Array:  # bfloat16
    """The weights times the scale, plus the offset, rounded once.

    A bfloat16 is the higher half of a float32; Mosaic's conversion is an instruction more.
    """
    given = [scale] if offset is None else [scale, offset]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * (1 + len(given)),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def multiply(_: Any, values: Any, *factors: Any) -> Any:
        pair, f32 = ir.VectorType.get((2,), ir.BF16Type.get()), ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        one, contract = ir.VectorType.get((1,), i32), arith.FastMathFlags.contract
        found = np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            both = element(vector.bitcast(one, register), 0)
            halves = arith.shli(both, mgpu.c(16, i32)), arith.andi(both, mgpu.c(-65536, i32))
            made = []
            for i, half in enumerate(halves):
                factor, *rest = (element(array.registers[place], i) for array in factors)
                value = arith.mulf(arith.bitcast(f32, half), factor, fastmath=contract)
                made.append(arith.addf(value, *rest, fastmath=contract) if rest else value)
            packed = assembly("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", made[::-1], "i32")
            found[place] = vector.bitcast(pair, vector.from_elements(one, [packed]))
        return mgpu.FragmentedArray(_registers=found, _layout=values.layout, _is_signed=None)

    return multiply(weights, *given)


def element(register: Any, index: int) -> Any:
    """An element of a vector."""
    return vector.extract(register, dynamic_position=[], static_position=[index])


def assembly(text: str, constraints: str, operands: Sequence[Any], result: str) -> Any:
    """Inline PTX without side effects; ``result`` is the MLIR type of its value."""
    attributes: dict[str, ir.Attribute] = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
    }
    made = ir.Operation.create(
        "llvm.inline_asm",
        results=[ir.Type.parse(result)],
        operands=list(operands),
        attributes=attributes,
    )
    return made.result


def _masked(words: jax.Array, shift: int, mask: int) -> jax.Array:
    """The bits ``mask`` of the words after a shift to the right (negative: to the left)."""
    if shift > 0:
        words = lax.shift_right_logical(words, jnp.int32(shift))
    elif shift < 0:
        words = lax.shift_left(words, jnp.int32(-shift))
    return words & jnp.int32(mask)


def operand(
    kind: str,
    tile: Ref,
    zero: jax.Array | float,  # float32[64]
) -> jax.Array:  # bfloat16[64, 64]
    """A tile's values minus ``zero``, divided by ``divisor(kind)``; exact.

    Eight bits are read as a bfloat16 number without a shift: the lowest exponents, subnormal and 1,
    make it the integer times 2**-133. A multiplication of up to 2**127 makes it normal.
    """
    words = load_words(tile)
    if kind == "fp4":
        # e2m1 has the fields of bfloat16 with a bias of 1 instead of 127, subnormals included.
        magnitude = [_masked(words, 4 * i - 6, 0x01C001C0) for i in range(4)]
        sign = [_masked(words, 4 * i - 12, -0x7FFF8000) for i in range(4)]
        both = [m | s for m, s in zip(magnitude, sign, strict=True)]
        return fragment(both, (2.0**126,) * 4)
    if kind == "fp8":
        # e4m3 has those fields too, with a bias of 7; its sign is stored inverted. NaN becomes 480.
        magnitude = [_masked(words, shift, 0x07F007F0) for shift in (-4, 4)]
        sign = [_masked(words, shift, -0x7FFF8000) for shift in (-8, 0)]
        both = [m | s for m, s in zip(magnitude, sign, strict=True)]
        return fragment(both, (-(2.0**120),) * 2)
    zero = zero / divisor(kind)
    if isinstance(zero, jax.Array):
        zero = lax.broadcast_in_dim(zero.astype(jnp.bfloat16), (TILE, TILE), [0])
    if kind == "int8":
        parts = [_masked(words, 8 * i, 0x00FF00FF) for i in range(2)]
        return fragment(parts, (2.0**127,) * 2, zero)
    low, high = 0x000F000F, 0x00F000F0
    parts = [_masked(words, shift, mask) for shift in (0, 8) for mask in (low, high)]
    return fragment(parts, (2.0**127, 2.0**123) * 2, zero)


def divisor(kind: str) -> float:
    """By which ``operand`` divides values."""
    return 1.0 if kind in ("fp4", "fp8") else 64.0
