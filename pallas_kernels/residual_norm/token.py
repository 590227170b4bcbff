"""Residual add and RMSNorm of one token by one warpgroup, in Pallas Mosaic GPU.

A warpgroup holds a token in tiles of ``COLUMNS`` components.
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

from pallas_kernels.pdl import grid_dependency_wait
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS, TILES

type Ref = Any

# Register layout of ``TILES`` tiles, [TILES, COLUMNS]: two tiles a warp, four components a thread.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((TILES, COLUMNS), (TILES // 4, COLUMNS), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class NormedToken(NamedTuple):
    """A token in spans of ``TILES`` tiles, each [TILES, COLUMNS]."""

    spans: Sequence[Any]  # slices of the tiles
    total: Sequence[jax.Array]  # the rounded sum
    normed: Sequence[jax.Array]


def add_and_norm(
    x: Ref,  # [tiles, COLUMNS]
    partials: Sequence[Ref],  # [tiles, COLUMNS] each; one or more
    weights: Ref,  # [tiles, COLUMNS]
    *,
    eps: float,
) -> NormedToken:
    """``residual_norm`` of a token; waits for the previous kernel (``grid_dependency_wait``)."""
    tiles, dtype = x.shape[0], x.dtype
    load = partial(plgpu.load, layout=_LAYOUT, optimized=False)
    spans = [pl.ds(first, TILES) for first in range(0, tiles, TILES)]
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
        squares = squares + totals[i].astype(jnp.float32) * totals[i].astype(jnp.float32)
    by_tile = plgpu.layout_cast(squares.sum(axis=1), _LAYOUT.reduce(1))
    factor = lax.rsqrt(by_tile.sum(axis=0) / (tiles * COLUMNS) + eps)
    normed = []
    for total, scale in zip(totals, scales, strict=True):
        scaled = total.astype(jnp.float32) * lax.broadcast_in_dim(factor, total.shape, [])
        normed.append((scaled * scale.astype(jnp.float32)).astype(dtype))
    return NormedToken(spans, totals, normed)
