"""residual_norm in Triton: one launch, one CTA per row.

With few rows latency dominates, so all loads of a row should be in flight before the first result
is used. The assembler saves registers instead: it moves loads behind additions, and the load of the
weights behind the whole sum. ``volatile`` keeps the loads in order, and the additions start with
the partial that was loaded last.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.residual_norm import launch
from pallas_kernels.residual_norm.ref import NormArgs


@triton.jit
def _add_and_norm(
    x,  # [T, D]
    partials,  # [PARTIALS, T, D]; unused without partials
    weights,  # [W, D]
    total,  # [T, D]; unwritten without partials
    normed,  # [T, D]
    EPS: tl.constexpr,
    ROW: tl.constexpr,
    PARTIALS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
    IN_FLIGHT: tl.constexpr,  # partials whose loads are in flight at the same time
):
    component = tl.arange(0, TILE)
    inside = component < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + component
    weight = tl.load(weights + ROW * WIDTH + component, mask=inside, other=0.0, volatile=True)
    x_row = tl.load(x + at, mask=inside, other=0.0, volatile=True)
    if PARTIALS > 0:
        partial_size = tl.num_programs(0).to(tl.int64) * WIDTH
        delta = tl.zeros((TILE,), tl.float32)
        for first in tl.static_range(0, PARTIALS, IN_FLIGHT):  # type: ignore[misc]
            loaded = ()
            for i in tl.static_range(first, first + IN_FLIGHT):  # type: ignore[misc]
                at_partial = partials + i * partial_size + at
                mask = inside & (i < PARTIALS)
                loaded = loaded + (tl.load(at_partial, mask=mask, other=0.0, volatile=True),)
            for i in tl.static_range(IN_FLIGHT):  # type: ignore[misc]
                delta += loaded[IN_FLIGHT - 1 - i].to(tl.float32)
        x_row = (x_row.to(tl.float32) + delta).to(x_row.dtype)
        tl.store(total + at, x_row, mask=inside)
    x32 = x_row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + EPS)
    tl.store(normed + at, (x32 * scale * weight.to(tl.float32)).to(x_row.dtype), mask=inside)


def residual_norm(args: NormArgs) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    x, partials = args.x, args.partials
    tokens, width = x.shape
    tile = power_of_two(width)
    count = 0 if partials is None else partials.size // x.size
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = jt.triton_call(
        x,
        x if partials is None else partials,
        args.weights,
        kernel=_add_and_norm,
        out_type=(jax.ShapeDtypeStruct((1,), x.dtype) if partials is None else result, result),
        grid=(tokens,),
        num_warps=launch.num_warps(tile),
        num_stages=1,
        EPS=args.eps,
        ROW=args.row,
        PARTIALS=count,
        WIDTH=width,
        TILE=tile,
        IN_FLIGHT=launch.loads_in_flight(count, tile),
    )
    return x if partials is None else total, normed
