"""swiglu_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A persistent kernel: one CTA per SM, which computes tile after tile. One warp of the memory
warpgroup issues TMA copies of tokens and weights, several K steps ahead and on into the next tile.
Two compute warpgroups multiply, each half of the tile's tokens with all its columns. In shared
memory a tile's gates are next to its ups, so one wgmma multiplies both (two wgmmas where they are
wider than N allows), and a thread has the gate and the up of a result in its own registers. While
one compute warpgroup runs its epilogue, the other one uses the tensor cores. The structure is that
of CUTLASS's cooperative kernels.
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
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm.launch import (
    COMPUTE_WARPGROUPS,
    ITEM_BYTES,
    MMA_COLUMNS,
    SwigluConfig,
    SwigluSizes,
    choose_config,
    result_shapes,
    sizes_of,
)

# Per thread: 504 of the 512 registers that three warpgroups may use.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: SwigluSizes
    config: SwigluConfig

    @property
    def rows(self) -> int:
        """Tokens of a compute warpgroup in a tile."""
        return self.config.block_t // COMPUTE_WARPGROUPS

    @property
    def num_steps(self) -> int:
        """K steps of a tile."""
        return self.sizes.inner // self.config.block_k

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Cluster tiles along tokens and columns; the last ones may extend past the end."""
        config = self.config
        tokens = config.block_t * config.cluster
        return -(-self.sizes.tokens // tokens), -(-self.sizes.outer // config.block_n)

    @property
    def num_tiles(self) -> int:
        """Cluster tiles of the call."""
        along_tokens, along_columns = self.tile_grid
        return along_tokens * along_columns

    @property
    def clusters(self) -> int:
        """Number of resident clusters."""
        return min(current_device().num_sms // self.config.cluster, self.num_tiles)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    out_smem: Ref  # [COMPUTE_WARPGROUPS, rows, block_n]
    w_smem: Ref  # [stages, block_k, 2, block_n]: gate, up
    x_smem: Ref  # [stages, block_t, block_k]
    lead_barrier: Ref  # the first compute warpgroup is ``lead`` steps ahead of the second
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup of the cluster
    barriers: Ref  # [stages]: one arrival per copy


class _Tile(NamedTuple):
    """Position of a CTA's tile; int32 scalars."""

    token: jax.Array  # first token
    column: jax.Array  # first column of the result
    first_step: jax.Array  # among all K steps of the CTA


def _cta_tiles(spec: _Spec) -> jax.Array:
    """Number of tiles that the CTA computes."""
    return lax.div(spec.num_tiles - 1 - lax.axis_index("cluster"), jnp.int32(spec.clusters)) + 1


def _tile(spec: _Spec, i: jax.Array) -> _Tile:
    """The CTA's i-th tile. The tiles of all clusters at the same i form a compact region."""
    config = spec.config
    index = i * spec.clusters + lax.axis_index("cluster")
    along_tokens, along_columns = plgpu.planar_snake(index, spec.tile_grid, 0, config.group)
    block = along_tokens * config.cluster + lax.axis_index("rank")
    return _Tile(block * config.block_t, along_columns * config.block_n, i * spec.num_steps)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _memory_warpgroup(
    spec: _Spec,
    x: Ref,  # [T, I]
    w: Ref,  # [I, 2, O]
    scratch: _Scratch,
) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    config, num_tiles = spec.config, _cta_tiles(spec)
    total_steps = num_tiles * spec.num_steps
    multicast = "rank" if config.cluster > 1 else None

    def inner(step: jax.Array) -> Any:
        return pl.ds(step * config.block_k, config.block_k)

    def copy_weights(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(spec, tile.first_step + step)
        columns = w.at[inner(step), :, pl.ds(tile.column, config.block_n)]
        w_smem, barrier = scratch.w_smem.at[stage], scratch.barriers.at[stage]
        plgpu.copy_gmem_to_smem(columns, w_smem, barrier, collective_axes=multicast)

    def copy_tokens(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(spec, tile.first_step + step)
        # TMA fills rows past the end of x with zeros.
        tokens = x.at[pl.ds(tile.token, config.block_t), inner(step)]
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], scratch.barriers.at[stage])

    def copy(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(spec, tile.first_step + step)
        pl.when(tile.first_step + step >= config.stages)(
            lambda: plgpu.barrier_wait(scratch.consumed_barriers.at[stage])
        )
        copy_weights(tile, step)
        copy_tokens(tile, step)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            first, prologue = _tile(spec, jnp.int32(0)), min(config.stages, spec.num_steps)
            pl.loop(0, prologue)(lambda step: copy_weights(first, step))
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


def _wgmma(accs: tuple[Ref, ...], x: Ref, w: Ref) -> None:
    """Issue accs += [rows, block_k] @ [block_k, 2 * block_n]: gates and ups in one accumulator, or
    in one each.

    JAX's interpreter cannot reshape ``w``, [block_k, 2, block_n].
    """
    both = w.reshape(w.shape[0], 2 * w.shape[2])
    for i, acc in enumerate(accs):
        width = acc.shape[1]
        plgpu.wgmma(acc, x, both.at[:, i * width : (i + 1) * width])


def _matmul(
    spec: _Spec, tile: _Tile, warpgroup: jax.Array, scratch: _Scratch
) -> tuple[jax.Array, jax.Array]:  # float32[rows, block_n]: gate, up
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""
    config = spec.config

    def release(step: jax.Array | int) -> None:
        plgpu.barrier_arrive(scratch.consumed_barriers.at[_stage(spec, tile.first_step + step)])

    def multiply(*accs: Ref) -> tuple[jax.Array, jax.Array]:
        def issue(step: jax.Array | int) -> None:
            stage = _stage(spec, tile.first_step + step)
            plgpu.barrier_wait(scratch.barriers.at[stage])
            x = scratch.x_smem.at[stage, pl.ds(warpgroup * spec.rows, spec.rows)]
            _wgmma(accs, x, scratch.w_smem.at[stage])

        def issue_and_release(step: jax.Array | int) -> None:
            issue(step)
            plgpu.wgmma_wait(len(accs))  # wait for the previous step
            release(step - 1)

        prologue = max(config.lead, 1)
        if config.lead:
            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(scratch.lead_barrier))
        issue(0)
        for step in range(1, prologue):
            issue_and_release(step)
        if config.lead:
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(scratch.lead_barrier))

        @pl.loop(prologue, spec.num_steps)
        def _step(step: jax.Array) -> None:
            issue_and_release(step)

        if len(accs) == 2:
            return accs[0][...], accs[1][...]
        both = accs[0][...]
        return both[:, : config.block_n], both[:, config.block_n :]

    count = -(-2 * config.block_n // MMA_COLUMNS)
    shape = (spec.rows, 2 * config.block_n // count)
    accs = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count
    gate_up = pl.run_scoped(multiply, *accs)
    release(spec.num_steps - 1)
    return gate_up


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The square of a reciprocal root is cheaper than a division, which is several instructions."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * up * root * root


def _compute_warpgroup(spec: _Spec, warpgroup: jax.Array, out: Ref, scratch: _Scratch) -> None:
    """The warpgroup's rows of all tiles of the CTA; ``out`` is [T, O]."""
    block_n = spec.config.block_n
    out_smem = scratch.out_smem.at[warpgroup]

    @pl.loop(0, _cta_tiles(spec))
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        gate, up = _matmul(spec, tile, warpgroup, scratch)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has been read
        out_smem[...] = _swiglu(gate, up).astype(out.dtype)
        plgpu.commit_smem()
        # TMA does not write rows past the end.
        rows = pl.ds(tile.token + warpgroup * spec.rows, spec.rows)
        plgpu.copy_smem_to_gmem(out_smem, out.at[rows, pl.ds(tile.column, block_n)])

    plgpu.wait_smem_to_gmem(0)


def _kernel(spec: _Spec, x: Ref, w: Ref, out: Ref, scratch: _Scratch) -> None:
    launch_dependents()
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _memory_warpgroup(spec, x, w, scratch)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _compute_warpgroup(spec, warpgroup, out, scratch)


def _scratch_types(spec: _Spec, dtype: Any) -> _Scratch:
    config = spec.config
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    lanes = config.lanes
    rows = (tiling((8, lanes)), swizzle(lanes * ITEM_BYTES))
    halves = (tiling((8, 1, lanes)), swizzle(lanes * ITEM_BYTES))
    consumed: Any = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages)
    if config.cluster > 1:
        consumed = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages
        )
    x_shape = (config.stages, config.block_t, config.block_k)
    w_shape = (config.stages, config.block_k, 2, config.block_n)
    out_shape = (COMPUTE_WARPGROUPS, spec.rows, config.block_n)
    return _Scratch(
        x_smem=plgpu.SMEM(x_shape, dtype, transforms=rows),
        w_smem=plgpu.SMEM(w_shape, dtype, transforms=halves),
        out_smem=plgpu.SMEM(out_shape, dtype, transforms=rows),
        barriers=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        consumed_barriers=consumed,
        lead_barrier=plgpu.Barrier(),
    )


@jax.jit  # one trace, one kernel for all layers
def swiglu_gemm(args: GemmArgs) -> jax.Array:  # [T, O]
    """See ``swiglu_gemm.api``."""
    return launch_with(choose_config(sizes_of(args)), args)


def launch_with(config: SwigluConfig, args: GemmArgs) -> jax.Array:  # [T, O]
    """``swiglu_gemm`` with a given configuration; the tuner calls it too.

    Raises ValueError when the configuration does not fit the call.
    """
    sizes = sizes_of(args)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    return plgpu.kernel(
        partial(_kernel, spec),
        out_type=result_shapes(args),
        scratch_types=(_scratch_types(spec, args.x.dtype),),
        grid=(spec.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("rank",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="swiglu_gemm",
    )(args.x, args.w.reshape(sizes.inner, 2, sizes.outer))
