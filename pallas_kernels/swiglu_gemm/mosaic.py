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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import geglu, swiglu_of_many
from pallas_kernels.gemm.pipeline import Ring, copy_tiles, divide_roles, launch
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.gemm.tiles import Tile, TileGrid
from pallas_kernels.lib.pdl import launch_dependents
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

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: SwigluSizes
    config: SwigluConfig
    gelu: bool

    @property
    def rows(self) -> int:
        """Tokens of a compute warpgroup in a tile."""
        return self.config.block_t // COMPUTE_WARPGROUPS

    @property
    def num_steps(self) -> int:
        """K steps of a tile."""
        return self.sizes.inner // self.config.block_k

    @property
    def grid(self) -> TileGrid:
        """The tiles; CTAs of a cluster have adjacent tokens."""
        config = self.config
        along_tokens = -(-self.sizes.tokens // (config.block_t * config.cluster))
        along = (along_tokens, -(-self.sizes.outer // config.block_n))
        return TileGrid(along, config.group, config.cluster)


def _tile(spec: _Spec, i: jax.Array) -> Tile:
    """The CTA's i-th tile."""
    config = spec.config
    along_tokens, along_columns = spec.grid.at(i)
    block = along_tokens * config.cluster + lax.axis_index("rank")
    return Tile(block * config.block_t, along_columns * config.block_n, i * spec.num_steps)


def _memory_warpgroup(
    spec: _Spec,
    x: Ref,  # [T, I]
    w: Ref,  # [I, 2, O]
    ring: Ring,
    scratch: Scratch,
) -> None:
    """Copy the K steps of all tiles."""
    config = spec.config
    multicast = "rank" if config.cluster > 1 else None

    def inner(step: jax.Array) -> Any:
        return pl.ds(step * config.block_k, config.block_k)

    def copy_weights(tile: Tile, step: jax.Array) -> None:
        stage = ring.stage(tile.first_step + step)
        columns = w.at[inner(step), :, pl.ds(tile.output, config.block_n)]
        w_smem, barrier = scratch.w_smem.at[stage], ring.barriers.at[stage]
        plgpu.copy_gmem_to_smem(columns, w_smem, barrier, collective_axes=multicast)

    def copy_tokens(tile: Tile, step: jax.Array) -> None:
        stage = ring.stage(tile.first_step + step)
        # TMA fills rows past the end of x with zeros.
        tokens = x.at[pl.ds(tile.token, config.block_t), inner(step)]
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], ring.barriers.at[stage])

    copy_tiles(ring, spec.grid, spec.num_steps, partial(_tile, spec), copy_weights, copy_tokens)


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
    spec: _Spec, tile: Tile, warpgroup: jax.Array, ring: Ring, scratch: Scratch
) -> tuple[jax.Array, jax.Array]:  # float32[rows, block_n]: gate, up
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""
    config = spec.config

    def release(step: jax.Array | int) -> None:
        ring.release(tile.first_step + step)

    def multiply(*accs: Ref) -> tuple[jax.Array, jax.Array]:
        def issue(step: jax.Array | int) -> None:
            stage = ring.stage(tile.first_step + step)
            plgpu.barrier_wait(ring.barriers.at[stage])
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
        pl.loop(prologue, spec.num_steps)(issue_and_release)
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


def _compute_warpgroup(
    spec: _Spec, out: Ref, ring: Ring, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's rows of all tiles of the CTA; ``out`` is [T, O]."""
    out_smem = scratch.out_smem.at[warpgroup]

    @pl.loop(0, spec.grid.tiles_of_cta())
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        gate, up = _matmul(spec, tile, warpgroup, ring, scratch)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has been read
        activated = geglu(gate, up) if spec.gelu else swiglu_of_many(gate, up)
        out_smem[...] = activated.astype(out.dtype)
        plgpu.commit_smem()
        # TMA does not write rows past the end.
        rows = pl.ds(tile.token + warpgroup * spec.rows, spec.rows)
        columns = pl.ds(tile.output, spec.config.block_n)
        plgpu.copy_smem_to_gmem(out_smem, out.at[rows, columns])

    plgpu.wait_smem_to_gmem(0)


def _kernel(spec: _Spec, arrays: tuple[Ref, Ref], out: Ref, scratch: Scratch) -> None:
    launch_dependents()
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        COMPUTE_WARPGROUPS,
        partial(_memory_warpgroup, spec, *arrays, ring, scratch),
        partial(_compute_warpgroup, spec, out, ring, scratch),
        moves_registers=True,
    )


def _scratch_types(spec: _Spec, dtype: Any) -> Scratch:
    config, lanes = spec.config, spec.config.lanes
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    halves = (tiling((8, 1, lanes)), swizzle(lanes * ITEM_BYTES))
    w_shape = (config.stages, config.block_k, 2, config.block_n)
    return Scratch(
        out_smem=smem((COMPUTE_WARPGROUPS, spec.rows, config.block_n), dtype, lanes),
        w_smem=plgpu.SMEM(w_shape, dtype, transforms=halves),
        x_smem=smem((config.stages, config.block_t, config.block_k), dtype, lanes),
        lead_barrier=plgpu.Barrier(),
        **stage_barriers(config.stages, 2, COMPUTE_WARPGROUPS, config.cluster),
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
    spec = _Spec(sizes, config, args.gelu)
    return launch(
        "swiglu_gemm",
        partial(_kernel, spec),
        (args.x, args.w.reshape(sizes.inner, 2, sizes.outer)),
        out_type=result_shapes(args),
        scratch=_scratch_types(spec, args.x.dtype),
        grid={"cluster": spec.grid.clusters},
        warpgroups=COMPUTE_WARPGROUPS + 1,
        cluster=config.cluster,
    )
