"""Packed values in registers, and the bfloat16 operands of wgmma that they become.

The registers of these arrays are renamed here, which Pallas itself cannot express. JAX's interpreter
cannot run this file: tests replace ``load_words``, ``fragment`` and ``times_bias``.
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
# Two bfloat16 numbers from 128 to 255 are this word and seven bits of each half.
MAGIC = 0x43004300


def _strided(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), WORDS)


def load_words(tile: Ref) -> jax.Array:  # uint8 or int8[...] in shared memory -> int32[words]
    """A tile's values, four consecutive words of each 16 bytes in a thread."""
    count = int(np.prod(tile.shape)) // 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=_strided(count)),
    )
    def load(_: Any, smem: Any) -> Any:
        index, i8, i32 = (
            ir.IndexType.get(),
            ir.IntegerType.get_signless(8),
            ir.IntegerType.get_signless(32),
        )
        flat = mgpu.memref_fold(smem, 0, len(smem.type.shape))
        thread = arith.index_cast(index, mgpu.thread_idx())
        thread = arith.remui(thread, mgpu.c(THREADS, index))
        first = arith.muli(thread, mgpu.c(4 * WORDS, index))
        registers = np.empty(count // (WORDS * THREADS), dtype=object)
        for i in range(len(registers)):
            at = arith.addi(first, mgpu.c(4 * WORDS * THREADS * i, index))
            found = vector.load(ir.VectorType.get((4 * WORDS,), i8), flat, [at], alignment=16)
            registers[i] = vector.bitcast(ir.VectorType.get((WORDS,), i32), found)
        layout = mgpu.WGStridedFragLayout((count,), WORDS)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(tile)


def fragment(words: Sequence[jax.Array]) -> jax.Array:  # int32[...] each -> bfloat16[64, 64]
    """Operand A of wgmma for a tile, from arrays whose words are its registers.

    ``words`` are four arrays of 512, one for each register of a wgmma: word i of a thread belongs
    to wgmma i. Or they are two of 1024 for the rows and the rows + 8: words 2 i and 2 i + 1 of a
    thread belong to wgmma i.
    """
    count = words[0].shape[0]

    @plgpu.inline_mgpu(
        arg_types=(_strided(count),) * len(words),
        return_type=plgpu.ShapeDtypeStruct(
            (TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def rename(_: Any, *arrays: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        named = [
            [vector.extract_strided_slice(one, r, [i], [1], [1]) for r in array.registers.flat
             for i in range(WORDS)]
            for array in arrays
        ]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE))
        registers = np.empty(shape, dtype=object)
        flat = registers.reshape(TILE // 8, 2)  # columns / 8, rows + 8: a view
        for column in range(TILE // 8):
            for half in range(2):
                if len(arrays) == 4:
                    word = named[2 * (column % 2) + half][column // 2]
                else:
                    word = named[half][column]
                flat[column, half] = vector.bitcast(pair, word)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return rename(*words)


def _masked(words: jax.Array, shift: int, mask: int, magic: int = MAGIC) -> jax.Array:
    """The bits ``mask`` of the words after a shift to the right (negative: to the left)."""
    if shift > 0:
        words = lax.shift_right_logical(words, jnp.int32(shift))
    elif shift < 0:
        words = lax.shift_left(words, jnp.int32(-shift))
    return (words & jnp.int32(mask)) | jnp.int32(magic)


def times_bias(scaled: jax.Array) -> jax.Array:  # bfloat16[64, 64]
    """Numbers times 2**126. They may be subnormal, which XLA on a CPU takes for zero."""
    return scaled * jnp.bfloat16(2.0**126)


def operand(kind: str, tile: Ref) -> tuple[jax.Array, float]:
    """A tile's values as bfloat16[64, 64] in registers, and a number to subtract from each."""
    words = load_words(tile)
    if kind == "int4":
        return fragment([_masked(words, 4 * i, 0x000F000F) for i in range(4)]), 128.0
    if kind == "int8":
        # value + 128 * sign bit as a number from 128 to 255, minus 128 or 256
        low = fragment([_masked(words, 8 * i, 0x007F007F) for i in range(2)])
        return low - fragment([_masked(words, 8 * i, 0x00800080) for i in range(2)]), 0.0
    # e2m1 has the fields of bfloat16 with a bias of 1 instead of 127, subnormals included.
    magnitude = [_masked(words, 4 * i - 6, 0x01C001C0, 0) for i in range(4)]
    sign = [_masked(words, 4 * i - 12, -0x7FFF8000, 0) for i in range(4)]
    scaled = fragment([m | s for m, s in zip(magnitude, sign, strict=True)])
    return times_bias(scaled), 0.0
