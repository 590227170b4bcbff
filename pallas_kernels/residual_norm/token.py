"""Residual add and RMSNorm of one token, in Pallas Mosaic GPU.

One warpgroup holds the token, or the compute warpgroups of a CTA divide it (``Share``). A token is
an array [tiles, columns]. GEMMs that normalise their token themselves take it as ``NormRefs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.pdl import grid_dependency_wait
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS, TILES
from pallas_kernels.residual_norm.ref import NormArgs

type Ref = Any

SPAN = TILES * COLUMNS  # components that a warpgroup loads at once: four of a thread


class Norm(NamedTuple):
    """A norm before a GEMM: its row of the norms' weights, and epsilon."""

    row: int
    eps: float


class NormRefs(NamedTuple):
    """Arrays in global memory that such a norm reads, or refs to them."""

    x: Ref  # [tiles, columns]
    partials: Ref  # [S, tiles, columns]
    norms: Ref  # [W, tiles, columns]


class NormedToken(NamedTuple):
    """A token, or a warpgroup's part of it, in spans of ``SPAN`` components."""

    spans: Sequence[Any]  # slices of the tiles
    total: Sequence[jax.Array]  # the rounded sum
    normed: Sequence[jax.Array]


class Share(NamedTuple):
    """How several warpgroups divide a token: each of them has every ``count``-th span.

    Where ``count`` does not divide the spans, the last one is computed, and written, repeatedly.
    """

    warpgroup: jax.Array
    count: int
    squares_smem: Ref  # float32[count, SPAN / columns]
    barrier: Ref  # one arrival per warpgroup


def ref_union(plain: Any, swizzled: Any) -> Any:
    """One allocation with two views. JAX's interpreter allocates each of them separately."""
    return plgpu.RefUnion(plain, swizzled)


def views(union: Ref) -> tuple[Ref, Ref]:
    """The plain and the swizzled view of a ``ref_union``."""
    return union[0], union[1]


def norm_arrays(args: NormArgs, columns: int) -> tuple[NormRefs, jax.ShapeDtypeStruct]:
    """The arrays of one token, and the type of the sum."""
    x, partials = args.x, args.partials
    assert partials is not None  # ``supports`` has refused the call
    tiles = (x.shape[1] // columns, columns)
    arrays = (x.reshape(tiles), partials.reshape(-1, *tiles), args.weights.reshape(-1, *tiles))
    return NormRefs(*arrays), jax.ShapeDtypeStruct(tiles, x.dtype)


def normed_token(norm: Norm, refs: NormRefs, share: Share | None = None) -> NormedToken:
    """``add_and_norm`` of the token of a GEMM."""
    partials = [refs.partials.at[i] for i in range(refs.partials.shape[0])]
    return add_and_norm(refs.x, partials, refs.norms.at[norm.row], eps=norm.eps, share=share)


def write_total(found: NormedToken, target: Ref) -> None:  # [tiles, columns]
    """Write the sum; one CTA of a GEMM does."""
    for span, total in zip(found.spans, found.total, strict=True):
        target[span] = total


def add_and_norm(
    x: Ref,  # [tiles, columns]
    partials: Sequence[Ref],  # [tiles, columns] each; one or more
    weights: Ref,  # [tiles, columns]
    *,
    eps: float,
    share: Share | None = None,
) -> NormedToken:
    """``residual_norm`` of a token; waits for the previous kernel (``grid_dependency_wait``)."""
    tiles, columns = x.shape
    layout, dtype = span_layout(columns), x.dtype
    load = partial(plgpu.load, layout=layout, optimized=False)
    spans, counted = _spans(tiles, SPAN // columns, share)
    # All loads are in flight before the first result is used.
    scales = [load(weights.at[span]) for span in spans]
    grid_dependency_wait()
    totals = [load(x.at[span]) for span in spans]
    loaded = [[load(partial_ref.at[span]) for span in spans] for partial_ref in partials]
    squares = jnp.zeros((), jnp.float32)
    for i in range(len(spans)):
        delta = loaded[0][i].astype(jnp.float32)
        for partial_ref in loaded[1:]:
            delta = delta + partial_ref[i].astype(jnp.float32)
        totals[i] = (totals[i].astype(jnp.float32) + delta).astype(dtype)
        square = totals[i].astype(jnp.float32) * totals[i].astype(jnp.float32)
        if (weight := counted[i]) is not None:
            square = square * lax.broadcast_in_dim(weight, square.shape, [])
        squares = squares + square
    by_tile = plgpu.layout_cast(squares.sum(axis=1), layout.reduce(1))
    total_square = by_tile.sum(axis=0) if share is None else _sum_of_warpgroups(share, by_tile)
    factor = lax.rsqrt(total_square / (tiles * columns) + eps)
    normed = []
    for total, scale in zip(totals, scales, strict=True):
        scaled = total.astype(jnp.float32) * lax.broadcast_in_dim(factor, total.shape, [])
        normed.append((scaled * scale.astype(jnp.float32)).astype(dtype))
    return NormedToken(spans, totals, normed)


def span_layout(columns: int) -> Any:
    """Register layout of a span, [SPAN / columns, columns]: four components a thread."""
    tiles = SPAN // columns
    if tiles == 4:  # one for each warp, which Mosaic wants without a tile of its own
        tiling = plgpu.Tiling(((tiles, columns), (4,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((tiles, columns), (tiles // 4, columns), (4,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _spans(
    tiles: int, tiles_of_span: int, share: Share | None
) -> tuple[list[Any], list[jax.Array | None]]:
    """The warpgroup's spans, and by which number their squares count; None: by 1."""
    if share is None:
        spans = [pl.ds(first, tiles_of_span) for first in range(0, tiles, tiles_of_span)]
        return spans, [None] * len(spans)
    count, spans, counted = tiles // tiles_of_span, [], list[jax.Array | None]()
    for first in range(0, count, share.count):
        index = first + share.warpgroup
        place = jnp.minimum(index, count - 1)
        spans.append(pl.ds(place * tiles_of_span, tiles_of_span))
        is_whole = first + share.count <= count
        counted.append(None if is_whole else (index < count).astype(jnp.float32))
    return spans, counted


def _sum_of_warpgroups(share: Share, by_tile: jax.Array) -> jax.Array:  # float32[tiles] -> scalar
    """The sum of all warpgroups' squares, in the same order in each of them.

    Mosaic's sum over the warps of a warpgroup has shared memory at an address that is the same in
    all warpgroups, so it must not run in several of them.
    """
    share.squares_smem.at[share.warpgroup][...] = by_tile
    plgpu.commit_smem()
    plgpu.barrier_arrive(share.barrier)
    plgpu.barrier_wait(share.barrier)
    shape = share.squares_smem.shape
    sums = [share.squares_smem[i, j] for i in range(shape[0]) for j in range(shape[1])]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
