"""8-bit pages in Triton kernels: see ``lib.page_scales``."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.lib import page_scales

LARGEST = tl.constexpr(page_scales.LARGEST)
SMALLEST_SCALE = tl.constexpr(page_scales.SMALLEST_SCALE)


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
def in_units(unit, scales):
    """The largest of ``unit`` and ``scales``, the factor that changes sums in ``unit`` to it, and
    scales divided by it.

    Weights times these are at most 1, so that 16 bits hold them whatever the values are.
    """
    largest = tl.maximum(unit, tl.max(scales, 0))
    return largest, unit / largest, scales / largest
