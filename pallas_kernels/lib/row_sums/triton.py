"""Sums over a row in Triton, with one CTA per row: their bits do not depend on the other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

TILE = 1024  # values that a CTA adds to its partial sums at a time


@triton.jit
def _sum(
    x,  # float32[R, D]
    out,  # float32[R]
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    EXPONENTS: tl.constexpr,  # the logarithm of the sum of exponentials instead
):
    row = tl.program_id(0)
    x += row.to(tl.int64) * WIDTH
    component = tl.arange(0, TILE)
    largest = 0.0
    if EXPONENTS:
        most = tl.full((TILE,), float("-inf"), tl.float32)
        for first in range(0, WIDTH, TILE):
            inside = first + component < WIDTH
            own = tl.load(x + first + component, mask=inside, other=float("-inf"))
            most = tl.maximum(most, own)
        largest = tl.max(most, 0)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, WIDTH, TILE):
        inside = first + component < WIDTH
        own = tl.load(x + first + component, mask=inside, other=0.0)
        if EXPONENTS:
            own = tl.where(inside, tl.exp(own - largest), 0.0)
        total += own
    found = tl.sum(total, 0)
    if EXPONENTS:
        found = tl.log(found) + largest
    tl.store(out + row, found)


def row_sums(x: jax.Array, *, exponents: bool = False) -> jax.Array:  # float32[R, D] -> [R]
    """The sum of each row, or the logarithm of the sum of its exponentials."""
    rows, width = x.shape
    return jt.triton_call(
        x,
        kernel=_sum,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(rows,),
        num_warps=4,
        num_stages=1,
        WIDTH=width,
        TILE=TILE,
        EXPONENTS=exponents,
    )
