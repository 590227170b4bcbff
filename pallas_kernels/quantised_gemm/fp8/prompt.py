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
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_device
from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised_gemm.fp8.launch import (
    MMA_ROWS,
    MMA_WEIGHTS,
    Fp8Sizes,
    PromptConfig,
    result_shape,
)
from pallas_kernels.quantised_gemm.fp8.quantise import quantised_groups
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP

# Registers of a thread by the number of compute warpgroups: compute, memory. Together they are 504
# of the 512 that a CTA's warpgroups may use.
REGISTERS = MappingProxyType({2: (232, 40), 3: (160, 24)})
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
    def tile_grid(self) -> tuple[int, int]:
        """Tiles along tokens and outputs; the last tokens may extend past the end."""
        along_tokens = -(-self.sizes.tokens // self.config.block_t)
        return along_tokens, self.sizes.outer // self.tile_outputs

    @property
    def padded_tokens(self) -> int:
        """Tokens of all tiles.

        Rows of ``out_scales`` are as long, since Mosaic copies a part of a row to global memory
        without a tensor map: what extends past the end of a row is written to the next one.
        """
        return self.tile_grid[0] * self.config.block_t

    @property
    def num_tiles(self) -> int:
        """Tiles of the call."""
        along_tokens, along_outputs = self.tile_grid
        return along_tokens * along_outputs

    @property
    def ctas(self) -> int:
        """Number of resident CTAs."""
        return min(current_device().num_sms, self.num_tiles)


class _GmemRefs(NamedTuple):
    """Refs to the arrays in global memory."""

    x: Ref  # e4m3[T, K]
    x_scales: Ref  # [K / GROUP, T or more]
    w: Ref  # e4m3[O, K]; with swiglu [2 * O, K]
    w_scales: Ref  # [O], or [O / GROUP, K / GROUP]
    out: Ref  # [T, O]
    out_scales: Ref = None  # [O / GROUP, padded_tokens] if results are quantised


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    out_smem: Ref  # [warpgroups, MMA_ROWS, width]
    out_scales_smem: Ref  # [warpgroups, MMA_ROWS] if results are quantised
    w_smem: Ref  # [stages, accs * MMA_WEIGHTS, GROUP]
    x_smem: Ref  # [stages, block_t, GROUP]
    scales_smem: Ref  # [stages, block_t]
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    barriers: Ref  # [stages]: one arrival per copy


class _Tile(NamedTuple):
    """Position of a CTA's tile; int32 scalars."""

    token: jax.Array  # first token
    output: jax.Array  # first output
    first_step: jax.Array  # among all K steps of the CTA


def _cta_tiles(spec: _Spec) -> jax.Array:
    """Number of tiles that the CTA computes."""
    return lax.div(spec.num_tiles - 1 - lax.axis_index("cta"), jnp.int32(spec.ctas)) + 1


def _tile(spec: _Spec, i: jax.Array) -> _Tile:
    """The CTA's i-th tile. The tiles of all CTAs at the same i form a compact region."""
    index = i * spec.ctas + lax.axis_index("cta")
    along_tokens, along_outputs = plgpu.planar_snake(index, spec.tile_grid, 0, spec.config.group)
    token, output = along_tokens * spec.config.block_t, along_outputs * spec.tile_outputs
    return _Tile(token, output, i * spec.sizes.groups)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _memory_warpgroup(spec: _Spec, gmem: _GmemRefs, scratch: _Scratch) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    config, num_tiles, steps = spec.config, _cta_tiles(spec), spec.sizes.groups
    total_steps = num_tiles * steps

    def copy_weights(tile: _Tile, step: jax.Array) -> None:
        stage, inner = _stage(spec, tile.first_step + step), pl.ds(step * GROUP, GROUP)
        for piece in range(spec.pieces):
            rows = pl.ds(piece * spec.piece_stride + tile.output, spec.width)
            w_smem = scratch.w_smem.at[stage, pl.ds(piece * spec.width, spec.width)]
            plgpu.copy_gmem_to_smem(gmem.w.at[rows, inner], w_smem, scratch.barriers.at[stage])

    def copy_tokens(tile: _Tile, step: jax.Array) -> None:
        stage, rows = _stage(spec, tile.first_step + step), pl.ds(tile.token, config.block_t)
        barrier = scratch.barriers.at[stage]
        # TMA fills rows past the end with zeros.
        tokens = gmem.x.at[rows, pl.ds(step * GROUP, GROUP)]
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], barrier)
        scales = gmem.x_scales.at[step, rows]
        plgpu.copy_gmem_to_smem(scales, scratch.scales_smem.at[stage], barrier)

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
            first, prologue = _tile(spec, jnp.int32(0)), min(config.stages, steps)
            pl.loop(0, prologue)(lambda step: copy_weights(first, step))
            grid_dependency_wait()
            pl.loop(0, prologue)(lambda step: copy_tokens(first, step))
            pl.loop(prologue, steps)(lambda step: copy(first, step))

            @pl.loop(1, num_tiles)
            def _next_tile(i: jax.Array) -> None:
                tile = _tile(spec, i)
                pl.loop(0, steps)(lambda step: copy(tile, step))

            # A CTA must not exit while a barrier has a phase that was not waited for.
            @pl.loop(jnp.maximum(total_steps - config.stages, 0), total_steps)
            def _drain(step: jax.Array) -> None:
                plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])


def _block_scales(
    spec: _Spec, tile: _Tile, gmem: _GmemRefs, step: jax.Array
) -> list[jax.Array]:  # by piece
    """The scales of a tile's blocks in a K step; none where rows have scales."""
    if not spec.sizes.blocks:
        return []
    rows = [tile.output + piece * spec.piece_stride for piece in range(spec.pieces)]
    return [gmem.w_scales[lax.div(row, jnp.int32(GROUP)), step] for row in rows]


def _matmul(
    spec: _Spec, tile: _Tile, warpgroup: jax.Array, gmem: _GmemRefs, scratch: _Scratch
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
        stage, added = _stage(spec, tile.first_step + step), list[jax.Array]()
        # Loaded a step ahead: otherwise the first sums are delayed and all of them are live.
        next_blocks = _block_scales(spec, tile, gmem, jnp.minimum(step + 1, last))
        plgpu.barrier_wait(scratch.barriers.at[stage])
        row, layout = scratch.scales_smem.at[stage, rows], plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(row, layout=layout, optimized=False)
        for i in range(accs):
            acc = plgpu.WGMMAAccumulatorRef((MMA_ROWS, MMA_WEIGHTS), jnp.float32)
            result = pl.run_scoped(partial(multiply, stage, i), acc)
            if i == accs - 1:
                plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])
            for first in range(0, MMA_WEIGHTS, width):
                piece = len(added)
                factor = scales * blocks[piece] if spec.sizes.blocks else scales
                factor = lax.broadcast_in_dim(factor, shape, [0])
                added.append(sums[piece] + result[:, first : first + width] * factor)
        return tuple(added), next_blocks

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    first = (zeros,) * spec.pieces, _block_scales(spec, tile, gmem, jnp.int32(0))
    return lax.fori_loop(0, spec.sizes.groups, step_body, first)[0]


def _with_row_scales(
    spec: _Spec, tile: _Tile, gmem: _GmemRefs, sums: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """The sums times the scales of rows, if rows have scales."""
    if spec.sizes.blocks:
        return list(sums)
    scaled, layout = list[jax.Array](), plgpu.Layout.WGMMA.reduce(0)
    for piece, total in enumerate(sums):
        rows = pl.ds(tile.output + piece * spec.piece_stride, spec.width)
        scales = plgpu.load(gmem.w_scales.at[rows], layout=layout, optimized=False)
        scaled.append(total * lax.broadcast_in_dim(scales, total.shape, [1]))
    return scaled


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The square of a reciprocal root is cheaper than a division, which is several instructions."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * up * root * root


def _compute_warpgroup(
    spec: _Spec, warpgroup: jax.Array, gmem: _GmemRefs, scratch: _Scratch
) -> None:
    """The warpgroup's tokens of all tiles of the CTA."""
    out_smem = scratch.out_smem.at[warpgroup]

    @pl.loop(0, _cta_tiles(spec))
    def _tile_body(i: jax.Array) -> None:
        tile = _tile(spec, i)
        sums = _matmul(spec, tile, warpgroup, gmem, scratch)
        results = _with_row_scales(spec, tile, gmem, sums)
        if spec.sizes.swiglu:
            results = [_swiglu(*results)]
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


def _kernel(spec: _Spec, *refs: Ref) -> None:
    *arrays, scratch = refs
    gmem = _GmemRefs(*arrays)
    launch_dependents()
    warpgroup, warpgroups = lax.axis_index("warpgroup"), spec.config.warpgroups
    compute_registers, memory_registers = REGISTERS[warpgroups]

    @pl.when(warpgroup == warpgroups)
    def _memory() -> None:
        plgpu.set_max_registers(memory_registers, action="decrease")
        _memory_warpgroup(spec, gmem, scratch)

    @pl.when(warpgroup < warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        _compute_warpgroup(spec, warpgroup, gmem, scratch)


def _scratch_types(spec: _Spec) -> _Scratch:
    config = spec.config
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, GROUP)), swizzle(GROUP))
    results = (tiling((8, OUT_LANES)), swizzle(2 * OUT_LANES))
    out_shape = (config.warpgroups, MMA_ROWS, spec.width)
    w_shape = (config.stages, config.accs * MMA_WEIGHTS, GROUP)
    x_shape = (config.stages, config.block_t, GROUP)
    return _Scratch(
        x_smem=plgpu.SMEM(x_shape, jnp.float8_e4m3fn, transforms=swizzled),
        w_smem=plgpu.SMEM(w_shape, jnp.float8_e4m3fn, transforms=swizzled),
        scales_smem=plgpu.SMEM((config.stages, config.block_t), jnp.float32),
        out_smem=plgpu.SMEM(out_shape, jnp.float8_e4m3fn, transforms=swizzled)
        if spec.quantised
        else plgpu.SMEM(out_shape, spec.sizes.dtype, transforms=results),
        out_scales_smem=plgpu.SMEM(out_shape[:2], jnp.float32) if spec.quantised else None,
        barriers=plgpu.Barrier(num_arrivals=spec.pieces + 2, num_barriers=config.stages),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
    )


def launch_with(
    config: PromptConfig,
    sizes: Fp8Sizes,
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / GROUP, T or more]
    w: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    w_scales: jax.Array,  # float32[O, 1], or [O / GROUP, K / GROUP]
    *,
    quantised: bool = False,
) -> Any:  # [T, O], or with ``quantised`` e4m3[T, O] and float32[O / GROUP, padded T]
    """GEMM of quantised tokens. Raises ValueError when the configuration does not fit the call."""
    if not config.fits(sizes) or quantised and not (sizes.swiglu and config.accs == 2):
        raise ValueError(f"{config} does not fit {sizes}")
    spec, out = _Spec(sizes, config, quantised), result_shape(sizes, 1)
    out_scales = jax.ShapeDtypeStruct((sizes.outer // GROUP, spec.padded_tokens), jnp.float32)
    values = jax.ShapeDtypeStruct(out.shape, jnp.float8_e4m3fn)
    return plgpu.kernel(
        partial(_kernel, spec),
        out_type=(values, out_scales) if quantised else out,
        scratch_types=(_scratch_types(spec),),
        grid=(spec.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="fp8_prompt_gemm",
    )(x, x_scales, w, w_scales if sizes.blocks else w_scales.reshape(-1))
