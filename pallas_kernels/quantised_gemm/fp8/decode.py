"""fp8 GEMM of a few quantised tokens in Pallas Mosaic GPU.

The kernel of ``skinny_gemm`` with 8-bit operands: M of a wgmma is 64 outputs, N the tokens. The
tensor cores add fp8 products with about 14 bits, so each group of 128 inputs has an accumulator of
its own, which is scaled and added to the float32 sum in registers.
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

from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised_gemm.fp8.launch import (
    MMA_ROWS,
    MMA_TOKENS,
    DecodeConfig,
    Fp8Sizes,
    result_shape,
)
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP, scale_tokens

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: Fp8Sizes
    config: DecodeConfig

    @property
    def halves(self) -> int:
        """2 with swiglu (gate and up), else 1."""
        return 1 + self.sizes.swiglu

    @property
    def token_rows(self) -> int:
        """Rows of ``x_smem``: the tokens, padded."""
        return max(self.sizes.tokens, MMA_TOKENS)

    @property
    def block_k(self) -> int:
        """Inputs of a K step."""
        return self.config.step_groups * GROUP


class _GmemRefs(NamedTuple):
    """Refs to the arrays in global memory."""

    x: Ref  # e4m3[T, K]
    x_scales: Ref  # [K / GROUP, scale_tokens(T)]
    w: Ref  # e4m3[O, K]; with swiglu [2 * O, K]
    w_scales: Ref  # [O], or [O / GROUP, K / GROUP]
    out: Ref  # [T, O], or of this CTA's split


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    w_smem: Ref  # [stages, 1 or 2, MMA_ROWS, block_k]
    x_smem: Ref  # [stages, token_rows, block_k]
    scales_smem: Ref  # [stages, step_groups, token_rows]
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    barriers: Ref  # [stages]: one arrival per copy


class _CtaTile(NamedTuple):
    """Outputs and K range of a CTA; int32 scalars."""

    output: jax.Array  # first output
    first_step: jax.Array  # counted from the start of the inputs
    num_steps: jax.Array


def _cta_tile(spec: _Spec) -> _CtaTile:
    split, config = lax.axis_index("split"), spec.config
    steps = spec.sizes.groups // config.step_groups
    first = lax.div(split * steps, jnp.int32(config.split_k))
    end = lax.div((split + 1) * steps, jnp.int32(config.split_k))
    return _CtaTile(lax.axis_index("tile") * MMA_ROWS, first, end - first)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _memory_warpgroup(spec: _Spec, tile: _CtaTile, gmem: _GmemRefs, scratch: _Scratch) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    step_groups = spec.config.step_groups

    def copy_weights(step: jax.Array) -> None:
        stage, inner = _stage(spec, step), pl.ds((tile.first_step + step) * spec.block_k, spec.block_k)
        for half in range(spec.halves):
            rows = pl.ds(half * spec.sizes.outer + tile.output, MMA_ROWS)
            w_smem, barrier = scratch.w_smem.at[stage, half], scratch.barriers.at[stage]
            plgpu.copy_gmem_to_smem(gmem.w.at[rows, inner], w_smem, barrier)

    def copy_tokens(step: jax.Array) -> None:
        stage, rows = _stage(spec, step), pl.ds(0, spec.token_rows)
        first = (tile.first_step + step) * step_groups
        barrier = scratch.barriers.at[stage]
        # TMA fills missing rows with zeros.
        tokens = gmem.x.at[rows, pl.ds(first * GROUP, spec.block_k)]
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], barrier)
        scales = gmem.x_scales.at[pl.ds(first, step_groups), rows]
        plgpu.copy_gmem_to_smem(scales, scratch.scales_smem.at[stage], barrier)

    prologue = jnp.minimum(tile.num_steps, spec.config.stages)
    pl.loop(0, prologue)(copy_weights)
    grid_dependency_wait()
    pl.loop(0, prologue)(copy_tokens)

    @pl.loop(prologue, tile.num_steps)
    def _step(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])
        copy_weights(step)
        copy_tokens(step)


def _block_scales(
    spec: _Spec, tile: _CtaTile, gmem: _GmemRefs, step: jax.Array
) -> list[list[jax.Array | float]]:  # by group and half
    """The scales of the CTA's blocks in a K step; 1 where rows have scales."""
    if not spec.sizes.blocks:
        return [[1.0] * spec.halves] * spec.config.step_groups
    first = (tile.first_step + step) * spec.config.step_groups
    block, half_blocks = lax.div(tile.output, jnp.int32(GROUP)), spec.sizes.outer // GROUP
    return [
        [gmem.w_scales[half * half_blocks + block, first + i] for half in range(spec.halves)]
        for i in range(spec.config.step_groups)
    ]


def _matmul(
    spec: _Spec, tile: _CtaTile, tokens: Any, gmem: _GmemRefs, scratch: _Scratch
) -> tuple[jax.Array, ...]:  # float32[MMA_ROWS, tokens], one for each half
    """Sum of the scaled results of the groups."""
    step_groups, halves = spec.config.step_groups, spec.halves
    shape = (MMA_ROWS, tokens.size)

    def multiply(stage: jax.Array, *accs: Ref) -> tuple[jax.Array, ...]:
        for i, acc in enumerate(accs):
            group, half = divmod(i, halves)
            inner = pl.ds(group * GROUP, GROUP)
            x = scratch.x_smem.at[stage, tokens, inner].transpose((1, 0))
            plgpu.wgmma(acc, scratch.w_smem.at[stage, half, :, inner], x)
        return tuple(acc[...] for acc in accs)

    def step_body(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage, sums = _stage(spec, step), list(sums)
        blocks = _block_scales(spec, tile, gmem, step)
        plgpu.barrier_wait(scratch.barriers.at[stage])
        accs = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * (step_groups * halves)
        parts = pl.run_scoped(partial(multiply, stage), *accs)
        for group in range(step_groups):
            row = scratch.scales_smem.at[stage, group, tokens]
            scales = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            for half in range(halves):
                factor = lax.broadcast_in_dim(scales * blocks[group][half], shape, [1])
                sums[half] = sums[half] + parts[group * halves + half] * factor

        # The stages of the last steps are not reused, so no copy waits for their release.
        @pl.when(step + spec.config.stages < tile.num_steps)
        def _release() -> None:
            plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])

        return tuple(sums)

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, tile.num_steps, step_body, (zeros,) * halves)


def _compute_warpgroup(
    spec: _Spec, tile: _CtaTile, warpgroup: jax.Array, gmem: _GmemRefs, scratch: _Scratch
) -> None:
    """Compute the warpgroup's tokens of the CTA's outputs, and write them from registers."""
    count, out = spec.token_rows // spec.config.warpgroups, gmem.out
    tokens = pl.ds(warpgroup * count, count)
    sums = list(_matmul(spec, tile, tokens, gmem, scratch))
    if not spec.sizes.blocks:
        for half in range(spec.halves):
            rows = gmem.w_scales.at[pl.ds(half * spec.sizes.outer + tile.output, MMA_ROWS)]
            scales = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            sums[half] = sums[half] * lax.broadcast_in_dim(scales, sums[half].shape, [0])
    result = sums[0]
    if spec.sizes.swiglu:
        result = result / (1.0 + jnp.exp(-result)) * sums[1]
    outputs = pl.ds(tile.output, MMA_ROWS)
    if spec.sizes.tokens >= MMA_TOKENS:
        # A register holds two adjacent outputs of a token instead of two tokens.
        result = plgpu.layout_cast(result.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        out.at[tokens, outputs].transpose((1, 0))[...] = result
        return
    index = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    for i in range(spec.sizes.tokens):
        row = jnp.where(index == i, result, 0.0).sum(axis=1)
        out.at[i, outputs][...] = row.astype(out.dtype)


def _kernel(spec: _Spec, *refs: Ref) -> None:
    *arrays, scratch = refs
    gmem = _GmemRefs(*arrays)
    launch_dependents()
    tile, warpgroup = _cta_tile(spec), lax.axis_index("warpgroup")

    @pl.when(warpgroup == spec.config.warpgroups)
    def _memory() -> None:
        _memory_warpgroup(spec, tile, gmem, scratch)

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        out = gmem.out if spec.config.split_k == 1 else gmem.out.at[lax.axis_index("split")]
        _compute_warpgroup(spec, tile, warpgroup, gmem._replace(out=out), scratch)


def _scratch_types(spec: _Spec) -> _Scratch:
    config = spec.config
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, GROUP)), swizzle(GROUP))
    weights = (config.stages, spec.halves, MMA_ROWS, spec.block_k)
    tokens = (config.stages, spec.token_rows, spec.block_k)
    scales = (config.stages, config.step_groups, spec.token_rows)
    return _Scratch(
        w_smem=plgpu.SMEM(weights, jnp.float8_e4m3fn, transforms=swizzled),
        x_smem=plgpu.SMEM(tokens, jnp.float8_e4m3fn, transforms=swizzled),
        scales_smem=plgpu.SMEM(scales, jnp.float32),
        barriers=plgpu.Barrier(num_arrivals=spec.halves + 2, num_barriers=config.stages),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
    )


def launch_with(
    config: DecodeConfig,
    sizes: Fp8Sizes,
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / GROUP, scale_tokens(T)]
    w: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    w_scales: jax.Array,  # float32[O, 1], or [O / GROUP, K / GROUP]
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """GEMM of quantised tokens. Raises ValueError when the configuration does not fit the call."""
    if not config.fits(sizes) or x_scales.shape != (sizes.groups, scale_tokens(sizes.tokens)):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    return plgpu.kernel(
        partial(_kernel, spec),
        out_type=result_shape(sizes, config.split_k),
        scratch_types=(_scratch_types(spec),),
        grid=(config.split_k, sizes.outer // MMA_ROWS),  # adjacent CTAs, adjacent outputs
        grid_names=("split", "tile"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="fp8_decode_gemm",
    )(x, x_scales, w, w_scales if sizes.blocks else w_scales.reshape(-1))
