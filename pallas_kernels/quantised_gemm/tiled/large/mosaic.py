"""quantised_gemm of many tokens in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A persistent kernel with the K steps of ``tiled.step``: one CTA per SM, which computes tile after
tile. One warp of the memory warpgroup issues TMA copies several K steps ahead and on into the next
tile. Each of two compute warpgroups multiplies 64 outputs: gates and ups, or adjacent outputs. One
makes its operand while the other one's matmul runs. The second one passes its ups to the first one
through shared memory. Two CTAs of a cluster use the same tokens, of which each copies half to both.
The sums of inputs that offsets multiply are computed before, by XLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_device
from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.large.launch import (
    PAIR,
    LargeConfig,
    choose_config,
    result_shapes,
)
from pallas_kernels.quantised_gemm.tiled.launch import TiledSizes, sizes_of
from pallas_kernels.quantised_gemm.tiled.step import (
    Gmem,
    Parts,
    Ref,
    Spec,
    Step,
    copy_sums,
    copy_weights,
    gmem_views,
    input_sums,
    swizzled,
    weight_types,
    write,
    zeros,
)

# Per thread: 504 of the 512 registers that three warpgroups may use.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: TiledSizes
    config: LargeConfig

    @property
    def step(self) -> Spec:
        """Those of a K step."""
        return Spec(self.sizes, self.config.step, sums_given=self.sizes.offsets)

    @property
    def num_steps(self) -> int:
        """K steps of a tile."""
        return self.sizes.inner // self.config.step.block_k

    @property
    def pairs(self) -> int:
        """Pairs of tiles of outputs."""
        return self.sizes.outer * self.sizes.halves // (PAIR * TILE)

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Cluster tiles along tokens and outputs; the last tokens may extend past the end."""
        return -(-self.sizes.tokens // self.config.step.block_t), self.pairs // self.config.cluster

    @property
    def num_tiles(self) -> int:
        """Cluster tiles of the call."""
        along_tokens, along_outputs = self.tile_grid
        return along_tokens * along_outputs

    @property
    def clusters(self) -> int:
        """Number of resident clusters."""
        return min(current_device().num_sms // self.config.cluster, self.num_tiles)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [stages, block_t, block_k]
    values_smem: Ref  # [stages, 2, tiles, rows, ROW_BYTES]
    parts_smem: Parts  # [stages, padding, 2, groups, 64] each
    sums_given_smem: Ref  # float32[stages, groups, block_t]; None without offsets
    ups_smem: Ref  # float32[64, block_t]
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup of the cluster
    ups_barrier: Ref
    ups_consumed_barrier: Ref


class _Tile(NamedTuple):
    """Position of a CTA's tile; int32 scalars."""

    token: jax.Array  # the first one
    pair: jax.Array
    first_step: jax.Array  # among all K steps of the CTA


def _cta_tiles(spec: _Spec) -> jax.Array:
    """Number of tiles that the CTA computes."""
    return lax.div(spec.num_tiles - 1 - lax.axis_index("cluster"), jnp.int32(spec.clusters)) + 1


def _tile(spec: _Spec, i: jax.Array) -> _Tile:
    """The CTA's i-th tile. The tiles of all clusters at the same i form a compact region."""
    index = i * spec.clusters + lax.axis_index("cluster")
    tokens, outputs = plgpu.planar_snake(index, spec.tile_grid, 0, spec.config.group)
    pair = outputs * spec.config.cluster + lax.axis_index("rank")
    return _Tile(tokens * spec.config.step.block_t, pair, i * spec.num_steps)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.step.stages))


def _memory_warpgroup(
    spec: _Spec,
    gmem: Gmem,
    sums: Ref,  # float32[groups, T], None without offsets
    scratch: _Scratch,
) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    config, num_tiles = spec.config.step, _cta_tiles(spec)
    total_steps = num_tiles * spec.num_steps
    multicast = "rank" if spec.config.cluster > 1 else None

    def copy_tile_weights(tile: _Tile, step: jax.Array) -> None:
        pair = tile.pair
        where = (slice(None), pair) if spec.sizes.swiglu else (0, pl.ds(PAIR * pair, PAIR))
        stage = _stage(spec, tile.first_step + step)
        copy_weights(spec.step, gmem, scratch, where, step, stage)

    def copy_tokens(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(spec, tile.first_step + step)
        inner = pl.ds(step * config.block_k, config.block_k)
        rows = pl.ds(tile.token, config.block_t)
        tokens = gmem.x.at[rows, inner]
        x_smem, barrier = scratch.x_smem.at[stage], scratch.barriers.at[stage]
        plgpu.copy_gmem_to_smem(tokens, x_smem, barrier, collective_axes=multicast)
        copy_sums(spec.step, sums, scratch, rows, step, stage)

    def copy(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(spec, tile.first_step + step)
        pl.when(tile.first_step + step >= config.stages)(
            lambda: plgpu.barrier_wait(scratch.consumed_barriers.at[stage])
        )
        copy_tile_weights(tile, step)
        copy_tokens(tile, step)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            first, prologue = _tile(spec, jnp.int32(0)), min(config.stages, spec.num_steps)
            pl.loop(0, prologue)(lambda step: copy_tile_weights(first, step))
            grid_dependency_wait()
            pl.loop(0, prologue)(lambda step: copy_tokens(first, step))
            pl.loop(prologue, spec.num_steps)(lambda step: copy(first, step))

            @pl.loop(1, num_tiles)
            def _next_tile(i: jax.Array) -> None:
                tile = _tile(spec, i)
                pl.loop(0, spec.num_steps)(lambda step: copy(tile, step))

            # A CTA must not exit while a barrier has a phase that was not waited for.
            @pl.loop(jnp.maximum(total_steps - config.stages, 0), total_steps)
            def _drain(step: jax.Array) -> None:
                plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])


def _accumulate(
    spec: _Spec, tile: _Tile, warpgroup: jax.Array, scratch: _Scratch
) -> jax.Array:  # float32[64, block_t]
    """The warpgroup's half of a tile."""

    def add(step: jax.Array, totals: Any) -> Any:
        stage = _stage(spec, tile.first_step + step)
        plgpu.barrier_wait(scratch.barriers.at[stage])
        totals = Step(spec.step, stage, warpgroup, scratch).add(totals)
        plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])
        return totals

    (total,) = lax.fori_loop(0, spec.num_steps, add, [zeros((TILE, spec.config.step.block_t))])
    return total


def _compute_warpgroup(spec: _Spec, warpgroup: jax.Array, out: Ref, scratch: _Scratch) -> None:
    """The warpgroup's half of all tiles of the CTA; ``out`` is [T, O]."""

    def share(i: jax.Array, ups: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch.ups_consumed_barrier))
        scratch.ups_smem[...] = ups
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.ups_barrier)

    def write_swiglu(tile: _Tile, gates: jax.Array) -> None:
        plgpu.barrier_wait(scratch.ups_barrier)
        ups = plgpu.load(scratch.ups_smem)
        plgpu.barrier_arrive(scratch.ups_consumed_barrier)
        write(spec.step, tile.pair, tile.token, [gates, ups], out)

    @pl.loop(0, _cta_tiles(spec))
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        total = _accumulate(spec, tile, warpgroup, scratch)
        if spec.sizes.swiglu:
            pl.when(warpgroup == 1)(partial(share, i, total))
            pl.when(warpgroup == 0)(partial(write_swiglu, tile, total))
        else:
            write(spec.step, PAIR * tile.pair + warpgroup, tile.token, [total], out)

    if spec.sizes.swiglu:  # the last ups have been read
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(scratch.ups_consumed_barrier))


def _kernel(spec: _Spec, gmem: Gmem, sums: Ref, scratch: _Scratch) -> None:
    launch_dependents()
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == PAIR)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _memory_warpgroup(spec, gmem, sums, scratch)

    @pl.when(warpgroup < PAIR)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _compute_warpgroup(spec, warpgroup, gmem.out, scratch)


def _scratch_types(spec: _Spec, parts: Parts) -> _Scratch:
    """``parts`` are the arrays of factors, [halves, O / 64, groups, 64] each."""
    config = spec.config.step
    values, parts_smem = weight_types(spec.step, parts, PAIR)
    consumed: Any = plgpu.Barrier(num_arrivals=PAIR, num_barriers=config.stages)
    if spec.config.cluster > 1:
        consumed = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=PAIR, num_barriers=config.stages
        )
    return _Scratch(
        x_smem=plgpu.SMEM(
            (config.stages, config.block_t, config.block_k),
            jnp.bfloat16,
            transforms=swizzled(spec.step.chunk, 2),
        ),
        values_smem=values,
        parts_smem=parts_smem,
        sums_given_smem=plgpu.SMEM(
            (config.stages, config.rows(spec.sizes.group), config.block_t), jnp.float32
        )
        if spec.sizes.offsets
        else None,
        ups_smem=plgpu.SMEM(
            (TILE, config.block_t if spec.sizes.swiglu else 32),
            jnp.float32,
            transforms=swizzled(32, 4),
        ),
        barriers=plgpu.Barrier(
            num_arrivals=2 + sum(part is not None for part in parts) + spec.sizes.offsets,
            num_barriers=config.stages,
        ),
        consumed_barriers=consumed,
        ups_barrier=plgpu.Barrier(),
        ups_consumed_barrier=plgpu.Barrier(),
    )


@jax.jit  # one trace for all layers
def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]
    """See ``quantised_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    return launch_with(choose_config(sizes_of(args)), args)


def launch_with(config: LargeConfig, args: QuantisedGemmArgs) -> jax.Array:  # [T, O]
    """``quantised_gemm`` with a given configuration; the result is not ``wide``.

    Raises ValueError when the configuration does not fit the call.
    """
    sizes = sizes_of(args)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    tiles, parts = gmem_views(sizes, args.w)
    present = [part for part in parts if part is not None]
    if sizes.offsets:
        present.append(input_sums(args.x, sizes.group))

    def body(x: Ref, tiles: Ref, *refs: Ref) -> None:
        *rest, out, scratch = refs
        sums = rest.pop() if sizes.offsets else None
        _kernel(spec, Gmem(x, tiles, parts.named(rest), out), sums, scratch)

    return plgpu.kernel(
        body,
        out_type=result_shapes(args),
        scratch_types=(_scratch_types(spec, parts),),
        grid=(spec.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("rank",),
        num_threads=PAIR + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="quantised_gemm_large",
    )(args.x, tiles, *present)
