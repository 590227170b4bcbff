"""fp8 GEMM of many quantised tokens in Pallas Mosaic GPU.

A persistent kernel like that of ``swiglu_gemm``: one CTA per SM computes tile after tile. One warp
of the memory warpgroup issues TMA copies several K steps ahead and on into the next tile. Two or
three compute warpgroups multiply, each 64 of the tile's tokens with all its rows of weights. A K
step is one group of 128 inputs. The tensor cores add fp8 products with about 14 bits, so each step
has an accumulator of its own, which is scaled and added to the float32 sums in registers. While one
warpgroup does that, the tensor cores work for another one.

The results of SwiGLU can be quantised in the epilogue (``quantised``), since a tile has whole
groups of them: the next GEMM then reads half of the bytes, and no kernel in between reads and
writes them.
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

from pallas_kernels.gemm.epilogues import swiglu_of_many
from pallas_kernels.gemm.pipeline import Ring, copy_tiles, divide_roles, launch
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.gemm.tiles import Tile, TileGrid
from pallas_kernels.lib.pdl import launch_dependents
from pallas_kernels.quantised_gemm.fp8.launch import (
    MMA_ROWS,
    MMA_WEIGHTS,
    Fp8Sizes,
    PromptConfig,
    result_shape,
)
from pallas_kernels.quantised_gemm.fp8.quantise import quantised_groups
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP

OUT_LANES = 64  # width of a swizzled tile of results, in 16-bit values

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: Fp8Sizes
    config: PromptConfig
    quantised: bool

    @property
    def width(self) -> int:
        """Weights of a piece: rows of the matrix that are adjacent and may be in one block."""
        shared = self.sizes.swiglu and self.config.accs == 1
        return MMA_WEIGHTS // 2 if shared else MMA_WEIGHTS

    @property
    def pieces(self) -> int:
        """Pieces of a tile; with swiglu gates and ups."""
        return self.config.accs * MMA_WEIGHTS // self.width

    @property
    def piece_stride(self) -> int:
        """Rows of the matrix from a piece to the next one."""
        return self.sizes.outer if self.sizes.swiglu else self.width

    @property
    def tile_outputs(self) -> int:
        """Outputs of a tile."""
        return self.width if self.sizes.swiglu else self.width * self.pieces

    @property
    def grid(self) -> TileGrid:
        """The tiles."""
        along_tokens = -(-self.sizes.tokens // self.config.block_t)
        along = (along_tokens, self.sizes.outer // self.tile_outputs)
        return TileGrid(along, self.config.group)

    @property
    def padded_tokens(self) -> int:
        """Tokens of all tiles.

        Rows of ``out_scales`` are as long, since Mosaic copies a part of a row to global memory
        without a tensor map: what extends past the end of a row is written to the next one.
        """
        return self.grid.along[0] * self.config.block_t


class _Gmem(NamedTuple):
    """Refs to the arrays in global memory."""

    x: Ref  # e4m3[T, K]
    x_scales: Ref  # [K / GROUP, T or more]
    w: Ref  # e4m3[O, K]; with swiglu [2 * O, K]
    w_scales: Ref  # [O], or [O / GROUP, K / GROUP]
    bias: Ref  # [O], or None
    out: Ref = None  # [T, O]
    out_scales: Ref = None  # [O / GROUP, padded_tokens] if results are quantised


def _tile(spec: _Spec, i: jax.Array) -> Tile:
    """The CTA's i-th tile."""
    along_tokens, along_outputs = spec.grid.at(i)
    token, output = along_tokens * spec.config.block_t, along_outputs * spec.tile_outputs
    return Tile(token, output, i * spec.sizes.groups)


def _memory_warpgroup(spec: _Spec, gmem: _Gmem, ring: Ring, scratch: Scratch) -> None:
    """Copy the K steps of all tiles."""

    def copy_weights(tile: Tile, step: jax.Array) -> None:
        stage, inner = ring.stage(tile.first_step + step), pl.ds(step * GROUP, GROUP)
        for piece in range(spec.pieces):
            rows = pl.ds(piece * spec.piece_stride + tile.output, spec.width)
            w_smem = scratch.w_smem.at[stage, pl.ds(piece * spec.width, spec.width)]
            plgpu.copy_gmem_to_smem(gmem.w.at[rows, inner], w_smem, ring.barriers.at[stage])

    def copy_tokens(tile: Tile, step: jax.Array) -> None:
        stage = ring.stage(tile.first_step + step)
        rows = pl.ds(tile.token, spec.config.block_t)
        barrier = ring.barriers.at[stage]
        # TMA fills rows past the end with zeros.
        tokens = gmem.x.at[rows, pl.ds(step * GROUP, GROUP)]
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], barrier)
        scales = gmem.x_scales.at[step, rows]
        plgpu.copy_gmem_to_smem(scales, scratch.scales_smem.at[stage], barrier)

    steps = spec.sizes.groups
    copy_tiles(ring, spec.grid, steps, partial(_tile, spec), copy_weights, copy_tokens)


def _block_scales(
    spec: _Spec, tile: Tile, gmem: _Gmem, step: jax.Array
) -> list[jax.Array]:  # by piece
    """The scales of a tile's blocks in a K step; none where rows have scales."""
    if not spec.sizes.blocks:
        return []
    rows = [tile.output + piece * spec.piece_stride for piece in range(spec.pieces)]
    return [gmem.w_scales[lax.div(row, jnp.int32(GROUP)), step] for row in rows]


def _matmul(
    spec: _Spec,
    tile: Tile,
    warpgroup: jax.Array,
    gmem: _Gmem,
    ring: Ring,
    scratch: Scratch,
) -> tuple[jax.Array, ...]:  # float32[MMA_ROWS, width], one for each piece
    """Sums of the scaled results of the K steps."""
    accs, rows = spec.config.accs, pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)
    shape, width = (MMA_ROWS, spec.width), spec.width

    def multiply(stage: jax.Array, i: int, acc: Ref) -> jax.Array:
        w = scratch.w_smem.at[stage, pl.ds(i * MMA_WEIGHTS, MMA_WEIGHTS)].transpose((1, 0))
        plgpu.wgmma(acc, scratch.x_smem.at[stage, rows], w)
        return acc[...]

    last = spec.sizes.groups - 1

    def step_body(step: jax.Array, carried: Any) -> Any:
        sums, blocks = carried
        stage, added = ring.stage(tile.first_step + step), list[jax.Array]()
        # Loaded a step ahead: otherwise the first sums are delayed and all of them are live.
        next_blocks = _block_scales(spec, tile, gmem, jnp.minimum(step + 1, last))
        plgpu.barrier_wait(ring.barriers.at[stage])
        row, layout = scratch.scales_smem.at[stage, rows], plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(row, layout=layout, optimized=False)
        for i in range(accs):
            acc = plgpu.WGMMAAccumulatorRef((MMA_ROWS, MMA_WEIGHTS), jnp.float32)
            result = pl.run_scoped(partial(multiply, stage, i), acc)
            if i == accs - 1:
                plgpu.barrier_arrive(ring.consumed_barriers.at[stage])
            for first in range(0, MMA_WEIGHTS, width):
                piece = len(added)
                factor = scales * blocks[piece] if spec.sizes.blocks else scales
                factor = lax.broadcast_in_dim(factor, shape, [0])
                added.append(sums[piece] + result[:, first : first + width] * factor)
        return tuple(added), next_blocks

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    first = (zeros,) * spec.pieces, _block_scales(spec, tile, gmem, jnp.int32(0))
    return lax.fori_loop(0, spec.sizes.groups, step_body, first)[0]


def _of_outputs(values: Ref, outputs: Any, shape: tuple[int, ...]) -> jax.Array:
    """A slice of one value for each output, in float32 and for each of a result's tokens."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    loaded = plgpu.load(values.at[outputs], layout=layout, optimized=False)
    return lax.broadcast_in_dim(loaded.astype(jnp.float32), shape, [1])


def _scaled(spec: _Spec, tile: Tile, gmem: _Gmem, sums: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The sums times the scales of rows, if rows have scales, plus the bias, if there is one."""
    found = list[jax.Array]()
    for piece, total in enumerate(sums):
        rows = pl.ds(tile.output + piece * spec.piece_stride, spec.width)
        if not spec.sizes.blocks:
            total = total * _of_outputs(gmem.w_scales, rows, total.shape)
        if gmem.bias is not None:
            total = total + _of_outputs(gmem.bias, rows, total.shape)
        found.append(total)
    return found


def _compute_warpgroup(
    spec: _Spec, gmem: _Gmem, ring: Ring, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's tokens of all tiles of the CTA."""
    out_smem = scratch.out_smem.at[warpgroup]

    @pl.loop(0, spec.grid.tiles_of_cta())
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        sums = _matmul(spec, tile, warpgroup, gmem, ring, scratch)
        results = _scaled(spec, tile, gmem, sums)
        if spec.sizes.swiglu:
            results = [swiglu_of_many(*results)]
        # TMA does not write rows past the end; ``out_scales`` has them.
        rows = pl.ds(tile.token + warpgroup * MMA_ROWS, MMA_ROWS)
        for piece, result in enumerate(results):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous results have been read
            if spec.quantised:
                # Not rounded to 16 bits before, which would be a slow instruction for each value.
                result, scratch.out_scales_smem[warpgroup, :] = quantised_groups(result)
            else:
                result = result.astype(spec.sizes.dtype)
            out_smem[...] = result
            plgpu.commit_smem()
            columns = pl.ds(tile.output + piece * spec.width, spec.width)
            plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[rows, columns])
            if spec.quantised:
                scales = gmem.out_scales.at[lax.div(tile.output, jnp.int32(GROUP)), rows]
                plgpu.copy_smem_to_gmem(scratch.out_scales_smem.at[warpgroup], scales)

    plgpu.wait_smem_to_gmem(0)


def _kernel(spec: _Spec, gmem: _Gmem, results: tuple[Ref, Ref], scratch: Scratch) -> None:
    out, out_scales = results
    gmem = gmem._replace(out=out, out_scales=out_scales)
    launch_dependents()
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        spec.config.warpgroups,
        partial(_memory_warpgroup, spec, gmem, ring, scratch),
        partial(_compute_warpgroup, spec, gmem, ring, scratch),
        moves_registers=True,
    )


def _scratch_types(spec: _Spec) -> Scratch:
    config, e4m3 = spec.config, jnp.float8_e4m3fn
    out = (config.warpgroups, MMA_ROWS, spec.width)
    dtype, lanes = (e4m3, GROUP) if spec.quantised else (spec.sizes.dtype, OUT_LANES)
    return Scratch(
        out_smem=smem(out, dtype, lanes),
        out_scales_smem=plgpu.SMEM(out[:2], jnp.float32) if spec.quantised else None,
        w_smem=smem((config.stages, config.accs * MMA_WEIGHTS, GROUP), e4m3, GROUP),
        x_smem=smem((config.stages, config.block_t, GROUP), e4m3, GROUP),
        scales_smem=plgpu.SMEM((config.stages, config.block_t), jnp.float32),
        **stage_barriers(config.stages, spec.pieces + 2, config.warpgroups),
    )


def launch_with(
    config: PromptConfig,
    sizes: Fp8Sizes,
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / GROUP, T or more]
    w: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    w_scales: jax.Array,  # float32[O, 1], or [O / GROUP, K / GROUP]
    bias: jax.Array | None = None,  # [O]; not with swiglu
    *,
    quantised: bool = False,
) -> Any:  # [T, O], or with ``quantised`` e4m3[T, O] and float32[O / GROUP, padded T]
    """GEMM of quantised tokens. Raises ValueError when the configuration does not fit the call."""
    if not config.fits(sizes) or quantised and not (sizes.swiglu and config.accs == 2):
        raise ValueError(f"{config} does not fit {sizes}")
    spec, out = _Spec(sizes, config, quantised), result_shape(sizes, 1)
    out_scales = jax.ShapeDtypeStruct((sizes.outer // GROUP, spec.padded_tokens), jnp.float32)
    values = jax.ShapeDtypeStruct(out.shape, jnp.float8_e4m3fn)
    results = launch(
        "fp8_prompt_gemm",
        partial(_kernel, spec),
        _Gmem(x, x_scales, w, w_scales if sizes.blocks else w_scales.reshape(-1), bias),
        out_type=(values, out_scales) if quantised else (out, None),
        scratch=_scratch_types(spec),
        grid={"cluster": spec.grid.clusters},
        warpgroups=config.warpgroups + 1,
    )
    return results if quantised else results[0]
