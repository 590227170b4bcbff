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

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import load_bias, plus_bias
from pallas_kernels.gemm.pipeline import Ring, copy_tiles, divide_roles, launch
from pallas_kernels.gemm.tiles import Tile, TileGrid
from pallas_kernels.lib.pdl import launch_dependents
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.copies import copy_sums, copy_weights
from pallas_kernels.quantised_gemm.tiled.large.launch import (
    PAIR,
    LargeConfig,
    choose_config,
    result_shapes,
)
from pallas_kernels.quantised_gemm.tiled.launch import TiledSizes, sizes_of
from pallas_kernels.quantised_gemm.tiled.scratch import TiledScratch, Ups, scratch_types
from pallas_kernels.quantised_gemm.tiled.step import (
    Gmem,
    Ref,
    Spec,
    Step,
    accumulate,
    gmem_views,
    input_sums,
    write,
)


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: TiledSizes
    config: LargeConfig

    @property
    def step(self) -> Spec:
        """Those of a K step."""
        return Spec(
            self.sizes,
            self.config.step,
            sums_given=self.sizes.offsets and not self.config.step.scales,
        )

    @property
    def num_steps(self) -> int:
        """K steps of a tile."""
        return self.sizes.inner // self.config.step.block_k

    @property
    def grid(self) -> TileGrid:
        """The tiles along tokens and pairs of tiles of outputs."""
        config, pairs = self.config, self.sizes.outer * self.sizes.halves // (PAIR * TILE)
        along = (-(-self.sizes.tokens // config.step.block_t), pairs // config.cluster)
        return TileGrid(along, config.group, config.cluster)


def _tile(spec: _Spec, i: jax.Array) -> Tile:
    """The CTA's i-th tile; its output is that of a pair."""
    tokens, outputs = spec.grid.at(i)
    pair = outputs * spec.config.cluster + lax.axis_index("rank")
    return Tile(tokens * spec.config.step.block_t, pair, i * spec.num_steps)


def _memory_warpgroup(spec: _Spec, gmem: Gmem, ring: Ring, scratch: TiledScratch) -> None:
    """Copy the K steps of all tiles."""
    config, multicast = spec.config.step, "rank" if spec.config.cluster > 1 else None

    def copy_tile_weights(tile: Tile, step: jax.Array) -> None:
        pair = tile.output
        where = (slice(None), pair) if spec.sizes.swiglu else (0, pl.ds(PAIR * pair, PAIR))
        stage = ring.stage(tile.first_step + step)
        copy_weights(spec.step, gmem, scratch, where, step, stage)

    def copy_tokens(tile: Tile, step: jax.Array) -> None:
        stage = ring.stage(tile.first_step + step)
        inner = pl.ds(step * config.block_k, config.block_k)
        rows = pl.ds(tile.token, config.block_t)
        tokens = gmem.x.at[rows, inner]
        x_smem, barrier = scratch.x_smem.at[stage], ring.barriers.at[stage]
        plgpu.copy_gmem_to_smem(tokens, x_smem, barrier, collective_axes=multicast)
        copy_sums(spec.step, gmem.sums, scratch, rows, step, stage)

    tile_at = partial(_tile, spec)
    copy_tiles(ring, spec.grid, spec.num_steps, tile_at, copy_tile_weights, copy_tokens)


def _compute_warpgroup(
    spec: _Spec,
    bias: Ref,  # [O], or None
    out: Ref,  # [T, O]
    ring: Ring,
    scratch: TiledScratch,
    warpgroup: jax.Array,
) -> None:
    """The warpgroup's half of all tiles of the CTA."""
    ups = Ups(scratch)

    def step_at(number: jax.Array, stage: jax.Array) -> Step:
        return Step(spec.step, stage, warpgroup, scratch, number)

    def write_swiglu(tile: Tile, gates: jax.Array) -> None:
        write(spec.step, tile.output, tile.token, [gates, ups.take()], out)

    @pl.loop(0, spec.grid.tiles_of_cta())
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        (total,) = accumulate(ring, spec.num_steps, tile.first_step, spec.step, step_at)
        if spec.sizes.swiglu:
            pl.when(warpgroup == 1)(partial(ups.put, i, total))
            pl.when(warpgroup == 0)(partial(write_swiglu, tile, total))
        else:
            index = PAIR * tile.output + warpgroup
            total = plus_bias(total, load_bias(bias, pl.ds(index * TILE, TILE)))
            write(spec.step, index, tile.token, [total], out)

    if spec.sizes.swiglu:
        pl.when(warpgroup == 1)(ups.wait_taken)


def _kernel(spec: _Spec, gmem: Gmem, out: Ref, scratch: TiledScratch) -> None:
    launch_dependents()
    ring = Ring(spec.config.step.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        PAIR,
        partial(_memory_warpgroup, spec, gmem, ring, scratch),
        partial(_compute_warpgroup, spec, gmem.bias, out, ring, scratch),
        moves_registers=True,
    )


def _scratch_types(spec: _Spec, gmem: Gmem) -> TiledScratch:
    return scratch_types(
        spec.step,
        gmem,
        tiles=PAIR,
        shared=(TILE, spec.config.step.block_t if spec.sizes.swiglu else 32),
        shared_barriers=plgpu.Barrier(),
        shared_consumed_barriers=plgpu.Barrier(),
        warpgroups=PAIR,
        cluster=spec.config.cluster,
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
    gmem = Gmem(args.x, *gmem_views(sizes, args.w), bias=args.bias)
    if spec.step.sums_given:
        gmem = gmem._replace(sums=input_sums(args.x, sizes.group))
    return launch(
        "quantised_gemm_large",
        partial(_kernel, spec),
        gmem,
        out_type=result_shapes(args),
        scratch=_scratch_types(spec, gmem),
        grid={"cluster": spec.grid.clusters},
        warpgroups=PAIR + 1,
        cluster=config.cluster,
    )
