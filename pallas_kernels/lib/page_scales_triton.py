"""8-bit pages in Triton kernels: see ``lib.page_scales``."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.lib import page_scales

LARGEST = tl.constexpr(page_scales.LARGEST)
SMALLEST_SCALE = tl.constexpr(page_scales.SMALLEST_SCALE)

# Of two int16 in a register: their low bytes, then their high bytes, each pair to two float16.
UNPACK_PAIRS = tl.constexpr(
    "{ .reg .b32 bytes; .reg .b16 low, high; prmt.b32 bytes, $2, 0, 0x3120; "
    "mov.b32 {low, high}, bytes; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@triton.jit
def scales_of(x, axis: tl.constexpr):
    """The scales of heads along ``axis``; of two parts of a head the larger one counts."""
    return tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis) * (1.0 / LARGEST), SMALLEST_SCALE)


@triton.jit
def rounded(x, scales):
    """8-bit floats, with the bits that XLA computes."""
    return tl.div_rn(x.to(tl.float32), scales).to(tl.float8e4nv)


@triton.jit
def values_of(entries, dtype: tl.constexpr, SCALED: tl.constexpr):
    """Entries of pages in ``dtype``, without their scales."""
    if SCALED:
        entries = entries.to(tl.float8e4nv, bitcast=True)
    return entries.to(dtype)


@triton.jit
def pairs_of(entries, dtype: tl.constexpr):
    """Two 8-bit floats in each int16 as two arrays in ``dtype``: of the low and the high bytes."""
    low, high = tl.inline_asm_elementwise(
        asm=UNPACK_PAIRS,  # pyright: ignore[reportArgumentType]
        constraints="=r,=r,r",
        args=[entries],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return low.to(dtype), high.to(dtype)  # pyright: ignore[reportArgumentType]


@triton.jit
def exponents_of(scales):
    """Exponents of powers of two up to scales: float32, without a slow conversion of integers."""
    exponents = (scales.to(tl.int32, bitcast=True) >> 23) | 0x4B000000  # plus 2^23, as floats
    return exponents.to(tl.float32, bitcast=True) - (8388608.0 + 127.0)
