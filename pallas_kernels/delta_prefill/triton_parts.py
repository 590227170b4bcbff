"""Parts that the Triton kernels of delta_prefill share: operands in halves, and the inverse."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(x, dtype: tl.constexpr):
    """float32 as a number of another dtype, and the rest in that dtype; 0 if it is float32."""
    if dtype == tl.bfloat16:  # by bits: a conversion there and back takes 8 cycles
        bits = (x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
        high = bits.to(tl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(tl.float32)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def split(x, dtype: tl.constexpr):
    """float32[K, N] as an operand [K, 2N]: each column's halves. float32 is not split."""
    if dtype != tl.float32:
        high, low = halves(x, dtype)  # type: ignore[misc]
        x = tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))
    return x


@triton.jit
def joined(product, dtype: tl.constexpr):
    """A product with a split operand: the sum of each column's halves."""
    if dtype != tl.float32:
        halves = tl.reshape(product, (product.shape[0], product.shape[1] // 2, 2))
        product = tl.sum(halves, 2)
    return product


@triton.jit
def times(a_high, a_low, b, dtype: tl.constexpr):
    """a @ b of float32 operands, the first one in halves."""
    b = split(b, dtype)
    product = tl.dot(a_high, b, input_precision="tf32x3")
    if dtype != tl.float32:
        product = tl.dot(a_low, b, product)
    return joined(product, dtype)


@triton.jit
def _corners(lower, dtype: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """The lower left quarters of blocks of 2 * SIZE on the diagonal, and zeros."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    inside = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    return tl.where(inside, lower, 0.0).to(dtype)


@triton.jit
def _merged(inverse, corners):
    """Inverses of blocks of twice the size, from those on the diagonal."""
    rounded = inverse.to(corners.dtype)
    below = tl.dot(rounded, corners, input_precision="tf32x3").to(corners.dtype)
    return inverse - tl.dot(below, rounded, input_precision="tf32x3")


@triton.jit
def unit_inverse(lower, inner: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of 1 + ``lower`` [CHUNK, CHUNK], which is strictly lower triangular.

    Blocks on the diagonal by elimination, all at once; from these, larger ones as in
    ``delta_prefill.xla.unit_inverse``, but rounded to ``inner``: float16, which products of keys of
    length 1 do not overflow. With X the rounded result and E = 1 - X (1 + ``lower``), the inverse
    is (1 + E + E^2 + ...) X; E was below 0.01 for all keys that were tried. Right operands of GEMMs
    are in shared memory: those that depend on ``lower`` come first, so that it is not in registers
    later, and an SM has four CTAs, not two.
    """
    BLOCK: tl.constexpr = CHUNK // 8
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    high, low = halves(lower, inner)  # type: ignore[misc]
    corners = _corners(lower, inner, CHUNK, BLOCK)
    corners2 = _corners(lower, inner, CHUNK, 2 * BLOCK)
    corners4 = _corners(lower, inner, CHUNK, 4 * BLOCK)
    blocks = tl.arange(0, BLOCKS)
    at = tl.arange(0, BLOCK)
    diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    tiles = tl.where(diagonal, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0)
    tiles = tl.sum(tiles, 2)  # [BLOCKS, BLOCK, BLOCK]
    inverses = tl.where((at[:, None] == at[None, :])[None], 1.0, tl.zeros_like(tiles))
    for step in range(BLOCK - 1):
        column = tl.sum(tl.where((at == step)[None, None, :], tiles, 0.0), 2)
        row = tl.sum(tl.where((at == step)[None, :, None], inverses, 0.0), 1)
        inverses -= column[:, :, None] * row[:, None, :]
    inverse = tl.where(diagonal, inverses[:, :, None, :], 0.0)
    inverse = tl.reshape(inverse, (CHUNK, CHUNK))
    inverse = _merged(_merged(_merged(inverse, corners), corners2), corners4)
    if inner != tl.float32:
        rounded = inverse.to(inner)
        one = tl.where(tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :], 1.0, 0.0)
        error = one - tl.dot(rounded, high, tl.dot(rounded, low, rounded.to(tl.float32)))
        first = error.to(inner)
        error = tl.dot(first, first, error).to(inner)
        inverse = tl.dot(error, rounded, rounded.to(tl.float32))
    return inverse
