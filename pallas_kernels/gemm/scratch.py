"""Shared memory and barriers of a GEMM's CTA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any


class Scratch(NamedTuple):
    """The scratch memory of a kernel of dense or fp8 weights, in this order; None: nothing."""

    out_smem: Ref = None  # [compute warpgroups, rows, columns]
    out_scales_smem: Ref = None  # [compute warpgroups, rows], of results that are quantised
    token_smem: Ref = None  # a normed token, see ``token.views``
    w_smem: Ref = None  # [stages, ...]
    x_smem: Ref = None  # [stages, tokens, block_k]
    scales_smem: Ref = None  # [stages, tokens], of tokens that are quantised
    lead_barrier: Ref = None  # the first compute warpgroup is ``lead`` steps ahead of the second
    consumed_barriers: Ref = None  # [stages]: one arrival per compute warpgroup of the cluster
    barriers: Ref = None  # [stages]: one arrival per copy


def swizzled(columns: int, itemsize: int) -> Any:
    """Transforms of a matrix whose tiles have this many columns."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(columns * itemsize)


def smem(shape: tuple[int, ...], dtype: Any, lanes: int) -> Any:
    """Shared memory for a matrix in swizzled tiles of this many columns."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(lanes, jnp.dtype(dtype).itemsize))


def stage_barriers(stages: int, copies: int, warpgroups: int, cluster: int = 1) -> dict[str, Any]:
    """The two barriers of each stage, by name; stages are consumed by all CTAs of the cluster."""
    consumed: Any = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    if cluster > 1:
        consumed = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=warpgroups, num_barriers=stages
        )
    barriers = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    return {"consumed_barriers": consumed, "barriers": barriers}
