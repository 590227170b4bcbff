"""experts in Triton, whose bits for a token do not depend on the other tokens.

Tokens are sorted into tiles of one width by expert. A row of a tile is multiplied as in
``skinny_gemm.fixed.triton``, in an order that neither the row's place nor the number of rows
changes, and a token's outputs are added in the order of its choices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.experts.fixed import launch as fixed_launch
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import size_of
from pallas_kernels.experts.tiles import Tiles
from pallas_kernels.experts.triton import gather, spread, tiles_of
from pallas_kernels.skinny_gemm.fixed.launch import FixedTiles
from pallas_kernels.skinny_gemm.fixed.triton import weights_tile


@triton.jit
def _multiply_tiles(
    x,  # [N * ROWS, I]: rows of tiles
    w,  # [E, O, I]
    bias,  # [E, O]; unused without BIAS
    expert_of,  # int32[N]
    rows_of,  # int32[N]: rows in use of each tile, the first ones
    out,  # [N * ROWS, O]; rows that are not in use are not written
    INNER: tl.constexpr,
    OUTER: tl.constexpr,  # O
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    used = tl.load(rows_of + tile)
    if used == 0:
        return
    expert = tl.load(expert_of + tile).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, inside = row < used, column < OUTER
    first_row = tile.to(tl.int64) * ROWS
    EVEN: tl.constexpr = INNER % BLOCK_K == 0
    w += expert * OUTER * INNER
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, INNER, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] if EVEN else is_row[:, None] & (inner < INNER)[None, :]
        at = (first_row + row)[:, None] * INNER + inner[None, :]
        tokens = tl.load(x + at, mask=mask, other=0.0)
        own = weights_tile(w, inner, column, inside, INNER, OUTER, True, EVEN)
        acc = tl.dot(tokens, own, acc, input_precision="ieee")
    if BIAS:
        added = tl.load(bias + expert * OUTER + column, mask=inside, other=0.0)
        acc += added.to(tl.float32)[None, :]
    at = (first_row + row)[:, None] * OUTER + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


def _multiplied(
    rows: jax.Array,  # [R, I]
    w: Any,  # [E, O, I]
    bias: jax.Array | None,  # [E, O]
    of: Tiles,
    tiles: FixedTiles,
    dtype: jnp.dtype,
) -> jax.Array:  # [R, O]
    """Each row times its tile's matrix."""
    outer = w.shape[1]
    return jt.triton_call(
        rows,
        w,
        w if bias is None else bias,
        of.expert,
        of.rows,
        kernel=_multiply_tiles,
        out_type=jax.ShapeDtypeStruct((len(rows), outer), dtype),
        grid=(len(of.expert), -(-outer // tiles.columns)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        INNER=rows.shape[1],
        OUTER=outer,
        BIAS=bias is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        BLOCK_K=tiles.block_k,
    )


def experts(args: ExpertsArgs) -> jax.Array:  # [T, D]
    """See ``experts.api``."""
    dtype, tiles = args.x.dtype, fixed_launch.tiles_for(args)
    of = tiles_of(args.choices, size_of(args.gate_up)[0], fixed_launch.WIDTH)
    rows = spread(args.x, of.place, fixed_launch.num_rows(args))
    outputs = _multiplied(rows, args.gate_up, args.gate_up_bias, of, tiles, jnp.dtype("float32"))
    hidden = args.activation.hidden(outputs).astype(dtype)
    return gather(
        _multiplied(hidden, args.down, args.down_bias, of, tiles, dtype), of.place, args.weights
    )
