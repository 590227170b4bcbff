"""sandwich_norm in Triton: one launch, one CTA per row.

As in ``residual_norm`` latency dominates with few rows: ``volatile`` keeps all loads before the
first result is used.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.residual_norm.launch import loads_in_flight, num_warps
from pallas_kernels.sandwich_norm.launch import MAX_NORMS, MAX_OUTPUTS
from pallas_kernels.sandwich_norm.ref import Normed, NormRow, SandwichArgs


@triton.jit
def _weight(
    weights,  # [W, D]
    component,
    ROW: tl.constexpr,  # negative: no norm
    WIDTH: tl.constexpr,
):
    """The weights of a norm, as they are; zeros where there is none."""
    inside = (component < WIDTH) & (ROW >= 0)
    return tl.load(weights + ROW * WIDTH + component, mask=inside, other=0.0, volatile=True)


@triton.jit
def _normed(
    x,  # [TILE]: 0 from WIDTH on
    weight,  # [TILE]
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The norm of a row, in its dtype."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + EPS)
    return (x32 * scale * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum(
    partials,  # [PARTIALS, T, D]
    at,  # int64[TILE]: of the row
    inside,
    size,  # T * D
    PARTIALS: tl.constexpr,
    TILE: tl.constexpr,
    IN_FLIGHT: tl.constexpr,  # partials whose loads are in flight at the same time
):
    """The sum of a row's partials, float32[TILE]."""
    total = tl.zeros((TILE,), tl.float32)
    for first in tl.static_range(0, PARTIALS, IN_FLIGHT):  # type: ignore[misc]
        loaded = ()
        for i in tl.static_range(first, first + IN_FLIGHT):  # type: ignore[misc]
            mask = inside & (i < PARTIALS)
            one = tl.load(partials + i * size + at, mask=mask, other=0.0, volatile=True)
            loaded = loaded + (one,)
        for i in tl.static_range(IN_FLIGHT):  # type: ignore[misc]
            total += loaded[IN_FLIGHT - 1 - i].to(tl.float32)
    return total


@triton.jit
def _sandwich(
    x,  # [T, D]
    first,  # [FIRST_PARTIALS, T, D]: the first output
    second,  # the same of the second one; unused without SECOND_PARTIALS
    factor,  # [1]; unused without HAS_FACTOR
    first_norm,  # [W, D] each; unused where the row is negative
    second_norm,
    post_norm,
    norm_0,
    norm_1,
    norm_2,
    total,  # [T, D]
    normed_0,  # [T, D] each; unwritten where the row is negative
    normed_1,
    normed_2,
    EPS: tl.constexpr,
    OUTPUT_EPS: tl.constexpr,
    FIRST_PARTIALS: tl.constexpr,
    SECOND_PARTIALS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SECOND_ROW: tl.constexpr,
    POST_ROW: tl.constexpr,
    ROW_0: tl.constexpr,
    ROW_1: tl.constexpr,
    ROW_2: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
    FIRST_IN_FLIGHT: tl.constexpr,
    SECOND_IN_FLIGHT: tl.constexpr,
):
    component = tl.arange(0, TILE)
    inside = component < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + component
    size = tl.num_programs(0).to(tl.int64) * WIDTH
    of_first = _weight(first_norm, component, FIRST_ROW, WIDTH)
    of_second = _weight(second_norm, component, SECOND_ROW, WIDTH)
    of_post = _weight(post_norm, component, POST_ROW, WIDTH)
    of_0 = _weight(norm_0, component, ROW_0, WIDTH)
    of_1 = _weight(norm_1, component, ROW_1, WIDTH)
    of_2 = _weight(norm_2, component, ROW_2, WIDTH)
    x_row = tl.load(x + at, mask=inside, other=0.0, volatile=True)
    delta = _sum(first, at, inside, size, FIRST_PARTIALS, TILE, FIRST_IN_FLIGHT)
    if SECOND_PARTIALS > 0:
        other = _sum(second, at, inside, size, SECOND_PARTIALS, TILE, SECOND_IN_FLIGHT)
    delta = delta.to(x_row.dtype)
    if FIRST_ROW >= 0:
        delta = _normed(delta, of_first, OUTPUT_EPS, WIDTH)
    if SECOND_PARTIALS > 0:
        other = other.to(x_row.dtype)
        if SECOND_ROW >= 0:
            other = _normed(other, of_second, OUTPUT_EPS, WIDTH)
        delta = (delta.to(tl.float32) + other.to(tl.float32)).to(x_row.dtype)
    if POST_ROW >= 0:
        delta = _normed(delta, of_post, OUTPUT_EPS, WIDTH)
    x_row = (x_row.to(tl.float32) + delta.to(tl.float32)).to(x_row.dtype)
    if HAS_FACTOR:
        x_row = (x_row.to(tl.float32) * tl.load(factor).to(tl.float32)).to(x_row.dtype)
    tl.store(total + at, x_row, mask=inside)
    if ROW_0 >= 0:
        x32 = x_row.to(tl.float32)
        scaled = x32 * tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + EPS)
        tl.store(normed_0 + at, (scaled * of_0.to(tl.float32)).to(x_row.dtype), mask=inside)
        if ROW_1 >= 0:
            tl.store(normed_1 + at, (scaled * of_1.to(tl.float32)).to(x_row.dtype), mask=inside)
        if ROW_2 >= 0:
            tl.store(normed_2 + at, (scaled * of_2.to(tl.float32)).to(x_row.dtype), mask=inside)


def sandwich_norm(args: SandwichArgs) -> Normed:
    """See ``sandwich_norm.api``."""
    x, outputs = args.x, args.outputs
    tokens, width = x.shape
    tile, count = power_of_two(width), len(args.norms)
    partials = [output.size // x.size for output in outputs] + [0] * (MAX_OUTPUTS - len(outputs))
    in_flight = [loads_in_flight(one, tile) for one in partials]
    of_outputs = [*args.output_norms, *(None for _ in range(MAX_OUTPUTS - len(outputs)))]
    norms: list[NormRow | None] = [*of_outputs, args.post, *args.norms]
    norms += [None] * (MAX_NORMS - count)
    rows = [-1 if norm is None else norm.row for norm in norms]
    result, unused = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1,), x.dtype)
    total, *normed = jt.triton_call(
        x,
        outputs[0],
        outputs[-1],
        x if args.factor is None else args.factor,
        *(x if norm is None else norm.weights for norm in norms),
        kernel=_sandwich,
        out_type=(result, *(result if i < count else unused for i in range(MAX_NORMS))),
        grid=(tokens,),
        num_warps=num_warps(tile),
        num_stages=1,
        EPS=args.eps,
        OUTPUT_EPS=args.output_eps,
        FIRST_PARTIALS=partials[0],
        SECOND_PARTIALS=partials[1],
        HAS_FACTOR=args.factor is not None,
        FIRST_ROW=rows[0],
        SECOND_ROW=rows[1],
        POST_ROW=rows[2],
        ROW_0=rows[3],
        ROW_1=rows[4],
        ROW_2=rows[5],
        WIDTH=width,
        TILE=tile,
        FIRST_IN_FLIGHT=in_flight[0],
        SECOND_IN_FLIGHT=in_flight[1],
    )
    return total, tuple(normed[:count])
