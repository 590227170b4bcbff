"""residual_norm in Triton: one launch, one program a row.

Few rows are a matter of latency, so all loads of a row are to be under way before the first is
waited for. The assembler would rather save registers: it has loads wait for additions, and that of
the weights for the whole sum. ``volatile`` keeps loads in their order, and the additions begin with
the part that was loaded last.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.numerics import power_of_two
from pallas_kernels.residual_norm import launch


@triton.jit
def _add_and_norm(
    x,  # [T, D]
    parts,  # [PARTS, T, D]; anything without parts
    weights,  # [W, D]
    total,  # [T, D]; unwritten without parts
    normed,  # [T, D]
    EPS: tl.constexpr,
    ROW: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,  # parts whose loads are under way at once
):
    component = tl.arange(0, TILE)
    inside = component < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + component
    weight = tl.load(weights + ROW * WIDTH + component, mask=inside, other=0.0, volatile=True)
    x_row = tl.load(x + at, mask=inside, other=0.0, volatile=True)
    if PARTS > 0:
        part_size = tl.num_programs(0).to(tl.int64) * WIDTH
        delta = tl.zeros((TILE,), tl.float32)
        for first in tl.static_range(0, PARTS, TOGETHER):  # type: ignore[misc]
            found = ()
            for i in tl.static_range(first, first + TOGETHER):  # type: ignore[misc]
                part = parts + i * part_size + at
                there = inside & (i < PARTS)
                found = found + (tl.load(part, mask=there, other=0.0, volatile=True),)
            for i in tl.static_range(TOGETHER):  # type: ignore[misc]
                delta += found[TOGETHER - 1 - i].to(tl.float32)
        x_row = (x_row.to(tl.float32) + delta).to(x_row.dtype)
        tl.store(total + at, x_row, mask=inside)
    x32 = x_row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + EPS)
    tl.store(normed + at, (x32 * scale * weight.to(tl.float32)).to(x_row.dtype), mask=inside)


def residual_norm(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    tokens, width = x.shape
    tile = power_of_two(width)
    count = 0 if parts is None else parts.size // x.size
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = jt.triton_call(
        x,
        x if parts is None else parts,
        weights,
        kernel=_add_and_norm,
        out_type=(jax.ShapeDtypeStruct((1,), x.dtype) if parts is None else whole, whole),
        grid=(tokens,),
        num_warps=launch.warps(tile),
        num_stages=1,
        EPS=eps,
        ROW=row,
        PARTS=count,
        WIDTH=width,
        TILE=tile,
        TOGETHER=launch.together(count, tile),
    )
    return x if parts is None else total, normed
