"""Shared memory and barriers of the kernels with weights in tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.scratch import smem, stage_barriers
from pallas_kernels.quantised_gemm.tiled import records
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.step import ROW_BYTES, Gmem, Parts, Spec, share

type Ref = Any

TMA_ALIGNMENT = 128  # bytes, of a copy's target


class TiledScratch(NamedTuple):
    """The scratch memory of a kernel, in this order; None: nothing."""

    x_smem: Ref  # [stages, block_t, block_k]; with a norm [chunks, 8, chunk], see ``token.views``
    values_smem: Ref  # [stages, tiles of outputs, tiles, rows, ROW_BYTES]
    # [stages, padding, tiles of outputs, groups, 64] each; of records see ``weight_types``
    parts_smem: Parts
    sums_given_smem: Ref  # float32[stages, groups, block_t]
    shared_smem: Ref  # float32[..., 64, block_t]: results for another compute warpgroup
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup of the cluster
    shared_barriers: Ref  # one arrival per compute warpgroup that shares results
    shared_consumed_barriers: Ref = None
    squares_smem: Ref = None  # of a norm, see ``token.Share``
    squares_barrier: Ref = None  # one arrival per compute warpgroup
    normed_barrier: Ref = None  # one arrival per compute warpgroup
    bytes_smem: Ref = None  # int8[chunks, 8, 4, chunk / 4], see ``integers.put``
    units_smem: Ref = None  # float32[4, units]: factors of units of tokens
    totals_smem: Ref = None  # int32[4, chunks]: sums of chunks of tokens


def weight_types(
    spec: Spec,
    values: jax.Array,  # as in ``Gmem``, and its parts
    parts: Parts,
    tiles: int,
) -> tuple[Any, Parts]:
    """Shared memory for the values and factors of ``tiles`` tiles of outputs, but not for scales of
    blocks.
    """
    config, sizes = spec.config, spec.sizes
    if sizes.super_group:
        count = config.block_k // spec.record_inputs
        own = (spec.record_inputs // TILE * spec.tile_rows, values.shape[3] - spec.value_rows)
        made = (
            plgpu.SMEM((config.stages, tiles, count, rows, records.WORDS), values.dtype)
            for rows in own
        )
        return next(made), Parts(words=next(made))

    def part_type(part: jax.Array | None) -> Any:
        if part is None:
            return None
        rows = config.rows(sizes.group)
        padding = max(1, TMA_ALIGNMENT // (tiles * rows * TILE * part.dtype.itemsize))
        return plgpu.SMEM((config.stages, padding, tiles, rows, TILE), part.dtype)

    shape = (config.stages, tiles, config.block_k // TILE, spec.tile_rows, ROW_BYTES)
    if sizes.block > 1:
        parts = parts._replace(scales=None)
    parts_smem = Parts(*map(part_type, parts))
    return plgpu.SMEM(shape, jnp.float8_e4m3fn if sizes.kind == "fp8" else jnp.uint8), parts_smem


def scratch_types(
    spec: Spec,
    gmem: Gmem,  # with the values and parts of ``gmem_views``
    *,
    tiles: int,  # of outputs
    shared: tuple[int, ...],
    shared_barriers: Any,
    warpgroups: int,
    copies: int = 1,  # of a K step's weights, and of each kind of factors
    cluster: int = 1,
    **more: Any,
) -> TiledScratch:
    """The types of a kernel's scratch; ``more`` are its other fields."""
    config, sizes = spec.config, spec.sizes
    stages, block_t = config.stages, config.block_t
    values, parts_smem = weight_types(spec, gmem.values, gmem.parts, tiles)
    factors = sum(part is not None for part in parts_smem)
    copies_tokens = not (sizes.normed or config.integers)
    arrivals = copies_tokens + copies * (1 + factors) + spec.sums_given
    columns = next(size for size in (32, 16, 8) if shared[-1] % size == 0)
    sums = plgpu.SMEM((stages, config.rows(sizes.group), block_t), jnp.float32)
    fields: dict[str, Any] = {
        "x_smem": smem((stages, block_t, config.block_k), jnp.bfloat16, spec.chunk),
        "values_smem": values,
        "parts_smem": parts_smem,
        "sums_given_smem": sums if spec.sums_given else None,
        "shared_smem": smem(shared, jnp.float32, columns),
        "shared_barriers": shared_barriers,
    }
    return TiledScratch(**fields | stage_barriers(stages, arrivals, warpgroups, cluster) | more)


@dataclass(frozen=True)
class Ups:
    """The ups that the second of two compute warpgroups passes to the first one."""

    scratch: TiledScratch

    def put(self, i: jax.Array, ups: jax.Array) -> None:  # float32[64, block_t]
        """Pass those of the CTA's i-th tile when the last ones have been taken."""
        pl.when(i > 0)(self.wait_taken)
        share([ups], lambda _: self.scratch.shared_smem, self.scratch.shared_barriers)

    def take(self) -> jax.Array:
        """Those of the next tile."""
        plgpu.barrier_wait(self.scratch.shared_barriers)
        ups = plgpu.load(self.scratch.shared_smem)
        plgpu.barrier_arrive(self.scratch.shared_consumed_barriers)
        return ups

    def wait_taken(self) -> None:
        """Wait until they have been taken; also at the end."""
        plgpu.barrier_wait(self.scratch.shared_consumed_barriers)
