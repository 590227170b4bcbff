"""skinny_gemm in Triton for any number of rows, whose bits do not depend on that number.

A CTA computes a tile of the result and walks all inner components in order: nothing is split, and
the activation is applied to the float32 sums of the tile. A row's sums are then those of its own
tokens and of the weights, in an order that neither the row's place nor the number of rows changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.skinny_gemm.fixed import launch as fixed_launch
from pallas_kernels.skinny_gemm.fixed.launch import FixedTiles
from pallas_kernels.skinny_gemm.ref import GemmArgs


@triton.jit
def weights_tile(
    w,  # [I, O], or by output [O, I]
    inner,  # int32[BLOCK_K]
    column,  # int32[COLUMNS]
    inside,  # bool[COLUMNS]
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,  # O
    BY_OUTPUT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile of the weights, [BLOCK_K, COLUMNS]."""
    if BY_OUTPUT:
        at = column[:, None].to(tl.int64) * INNER + inner[None, :]
        mask = inside[:, None] if EVEN else inside[:, None] & (inner < INNER)[None, :]
        return tl.trans(tl.load(w + at, mask=mask, other=0.0))
    at = inner[:, None].to(tl.int64) * WIDTH + column[None, :]
    mask = inside[None, :] if EVEN else inside[None, :] & (inner < INNER)[:, None]
    return tl.load(w + at, mask=mask, other=0.0)


@triton.jit
def _multiply(
    x,  # [T, I]
    w,  # [I, O], or by output [O, I]; with an activation [I, 2 * O]: gate, up
    bias,  # [O], if there is one
    out,  # [T, O]
    num_tokens,  # T; not a constexpr, so all buckets share a kernel
    INNER: tl.constexpr,
    OUTER: tl.constexpr,  # O
    BY_OUTPUT: tl.constexpr,
    SWIGLU: tl.constexpr,
    GELU: tl.constexpr,  # with SWIGLU: GELU instead of SiLU
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, inside = row < num_tokens, column < OUTER
    EVEN: tl.constexpr = INNER % BLOCK_K == 0
    WIDTH: tl.constexpr = OUTER * (1 + SWIGLU)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, INNER, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] if EVEN else is_row[:, None] & (inner < INNER)[None, :]
        at = row[:, None].to(tl.int64) * INNER + inner[None, :]
        tokens = tl.load(x + at, mask=mask, other=0.0)
        own = weights_tile(w, inner, column, inside, INNER, WIDTH, BY_OUTPUT, EVEN)
        acc = tl.dot(tokens, own, acc, input_precision="ieee")
        if SWIGLU:
            own = weights_tile(w + OUTER, inner, column, inside, INNER, WIDTH, BY_OUTPUT, EVEN)
            ups = tl.dot(tokens, own, ups, input_precision="ieee")
    if GELU:
        turned = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        acc = acc * (1.0 - 1.0 / (tl.exp(2.0 * turned) + 1.0)) * ups  # (1 + tanh) / 2
    elif SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * ups
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = row[:, None].to(tl.int64) * OUTER + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


def skinny_gemm(args: GemmArgs) -> jax.Array:  # [T, O]
    """See ``skinny_gemm.api``."""
    return launch_with(fixed_launch.tiles_for(args), args)


def launch_with(tiles: FixedTiles, args: GemmArgs) -> jax.Array:  # [T, O]
    """``skinny_gemm`` with given tiles."""
    tokens, inner = args.x.shape
    width = args.w.shape[0 if args.by_output else 1]
    outer = width // 2 if args.swiglu else width
    dtype = jnp.dtype("float32") if args.wide else args.x.dtype
    return jt.triton_call(
        args.x,
        args.w,
        args.x if args.bias is None else args.bias,
        kernel=_multiply,
        out_type=jax.ShapeDtypeStruct((tokens, outer), dtype),
        grid=(-(-tokens // tiles.rows), -(-outer // tiles.columns)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        num_tokens=tokens,
        INNER=inner,
        OUTER=outer,
        BY_OUTPUT=args.by_output,
        SWIGLU=args.swiglu,
        GELU=args.gelu,
        HAS_BIAS=args.bias is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        BLOCK_K=tiles.block_k,
    )
