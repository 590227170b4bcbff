"""RMSNorm of one token by one warpgroup, with the sum before it, in Pallas Mosaic GPU.

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

from pallas_kernels.pdl import await_kernel_before
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS, TILES

type Ref = Any

# How a warpgroup holds ``TILES`` tiles of a token, [TILES, COLUMNS]: a warp two of them, a thread
# four components.
_HELD = plgpu.Layout.TILED(
    plgpu.Tiling(((TILES, COLUMNS), (TILES // 4, COLUMNS), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Normed(NamedTuple):
    """A token by spans of ``TILES`` tiles, each [TILES, COLUMNS]."""

    spans: Sequence[Any]  # of tiles
    total: Sequence[jax.Array]  # the sum, rounded
    normed: Sequence[jax.Array]


def added_and_normed(
    x: Ref,  # [tiles, COLUMNS]
    parts: Sequence[Ref],  # [tiles, COLUMNS] each; one or more
    weights: Ref,  # [tiles, COLUMNS]
    *,
    eps: float,
) -> Normed:
    """``residual_norm`` of a token, after the kernel before this one has ended."""
    tiles, dtype = x.shape[0], x.dtype
    load = partial(plgpu.load, layout=_HELD, optimized=False)
    spans = [pl.ds(first, TILES) for first in range(0, tiles, TILES)]
    # All loads are under way before the first is waited for.
    scales = [load(weights.at[span]) for span in spans]
    await_kernel_before()
    sums = [load(x.at[span]) for span in spans]
    found = [[load(part.at[span]) for span in spans] for part in parts]
    squares = jnp.zeros((), jnp.float32)
    for i in range(len(spans)):
        delta = found[0][i].astype(jnp.float32)
        for part in found[1:]:
            delta = delta + part[i].astype(jnp.float32)
        sums[i] = (sums[i].astype(jnp.float32) + delta).astype(dtype)
        squares = squares + sums[i].astype(jnp.float32) * sums[i].astype(jnp.float32)
    by_tile = plgpu.layout_cast(squares.sum(axis=1), _HELD.reduce(1))
    factor = lax.rsqrt(by_tile.sum(axis=0) / (tiles * COLUMNS) + eps)
    normed = []
    for total, scale in zip(sums, scales, strict=True):
        scaled = total.astype(jnp.float32) * lax.broadcast_in_dim(factor, total.shape, [])
        normed.append((scaled * scale.astype(jnp.float32)).astype(dtype))
    return Normed(spans, sums, normed)
