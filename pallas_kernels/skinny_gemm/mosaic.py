"""skinny_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

With few tokens a GEMM is bound by reading its weights. The memory warpgroup of a CTA issues TMA
copies of them many K steps ahead; the compute warpgroups multiply. The GEMM is transposed: M of a
wgmma is always 64, which are columns of weights, and N is any multiple of 8, which are tokens. So
no tensor core works on padding, and weights go from global to shared memory to the tensor cores
without passing through registers.
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
from pallas_kernels.skinny_gemm.cases import GemmSizes, sizes_of
from pallas_kernels.skinny_gemm.launch import (
    MMA_COLUMNS,
    MMA_TOKENS,
    GemmConfig,
    choose_config,
    result_shape,
)
from pallas_kernels.skinny_gemm.ref import GemmArgs

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: GemmSizes
    config: GemmConfig

    @property
    def halves(self) -> int:
        """2 with swiglu (gate and up), else 1."""
        return 1 + self.sizes.swiglu

    @property
    def token_rows(self) -> int:
        """Rows of ``x_smem``: the tokens, padded."""
        return max(self.sizes.tokens, MMA_TOKENS)

    @property
    def by_columns(self) -> bool:
        """True if the compute warpgroups divide the columns; otherwise they divide the tokens."""
        return self.config.block_n // MMA_COLUMNS >= self.config.warpgroups

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Columns and tokens of a compute warpgroup."""
        block_n, warpgroups = self.config.block_n, self.config.warpgroups
        if self.by_columns:
            return block_n // warpgroups, self.token_rows
        return block_n, self.token_rows // warpgroups


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    w_smem: Ref  # [stages, 1 or 2, block_k, block_n]
    x_smem: Ref  # [stages, token_rows, block_k]
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    barriers: Ref  # [stages]: one arrival per copy


class _CtaTile(NamedTuple):
    """Output columns and K range of a CTA; int32 scalars."""

    column: jax.Array  # first column of the result
    first_step: jax.Array  # counted from the start of the inner axis
    num_steps: jax.Array


def _cta_tile(spec: _Spec) -> _CtaTile:
    split, config = lax.axis_index("split"), spec.config
    steps = spec.sizes.inner // config.block_k
    first = lax.div(split * steps, jnp.int32(config.split_k))
    end = lax.div((split + 1) * steps, jnp.int32(config.split_k))
    return _CtaTile(lax.axis_index("tile") * config.block_n, first, end - first)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _memory_warpgroup(
    spec: _Spec,
    tile: _CtaTile,
    x: Ref,  # [T, I]
    w: Ref,  # [I, O]; with swiglu [I, 2 * O]
    scratch: _Scratch,
) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    block_n, block_k = spec.config.block_n, spec.config.block_k

    def inner(step: jax.Array) -> Any:
        return pl.ds((tile.first_step + step) * block_k, block_k)

    def copy_weights(step: jax.Array) -> None:
        stage = _stage(spec, step)
        for half in range(spec.halves):
            columns = pl.ds(half * spec.sizes.outer + tile.column, block_n)
            w_smem, barrier = scratch.w_smem.at[stage, half], scratch.barriers.at[stage]
            plgpu.copy_gmem_to_smem(w.at[inner(step), columns], w_smem, barrier)

    def copy_tokens(step: jax.Array) -> None:
        stage = _stage(spec, step)
        tokens = x.at[pl.ds(0, spec.token_rows), inner(step)]  # TMA fills missing rows with zeros
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], scratch.barriers.at[stage])

    prologue = jnp.minimum(tile.num_steps, spec.config.stages)
    pl.loop(0, prologue)(copy_weights)
    grid_dependency_wait()
    pl.loop(0, prologue)(copy_tokens)

    @pl.loop(prologue, tile.num_steps)
    def _step(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])
        copy_weights(step)
        copy_tokens(step)


def _matmul(
    spec: _Spec, tile: _CtaTile, columns: Any, tokens: Any, scratch: _Scratch
) -> tuple[jax.Array, ...]:  # float32[columns, tokens], one for each half
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""

    def multiply(*accs: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, tile.num_steps)
        def _step(step: jax.Array) -> None:
            stage = _stage(spec, step)
            plgpu.barrier_wait(scratch.barriers.at[stage])
            x = scratch.x_smem.at[stage, tokens].transpose((1, 0))
            for half, acc in enumerate(accs):
                w = scratch.w_smem.at[stage, half, :, columns].transpose((1, 0))
                plgpu.wgmma(acc, w, x)
            plgpu.wgmma_wait(spec.halves)  # wait for the previous step

            # The stages of the last steps are not reused, so no copy waits for their release.
            @pl.when((step > 0) & (step - 1 + spec.config.stages < tile.num_steps))
            def _release() -> None:
                plgpu.barrier_arrive(scratch.consumed_barriers.at[_stage(spec, step - 1)])

        return tuple(acc[...] for acc in accs)

    accs = [plgpu.WGMMAAccumulatorRef(spec.warpgroup_tile, jnp.float32)] * spec.halves
    return pl.run_scoped(multiply, *accs)


def _compute_warpgroup(
    spec: _Spec, tile: _CtaTile, warpgroup: jax.Array, out: Ref, scratch: _Scratch
) -> None:
    """Compute the warpgroup's tile of the result, [T, O], and write it from registers."""
    width, count = spec.warpgroup_tile
    column, token = (warpgroup * width, 0) if spec.by_columns else (0, warpgroup * count)
    tokens = pl.ds(token, count)
    accs = _matmul(spec, tile, pl.ds(column, width), tokens, scratch)
    result = accs[0]
    if spec.sizes.swiglu:
        result = result / (1.0 + jnp.exp(-result)) * accs[1]
    columns = pl.ds(tile.column + column, width)
    if spec.sizes.tokens >= MMA_TOKENS:
        # A register holds two adjacent columns of a token instead of two tokens.
        result = plgpu.layout_cast(result.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        out.at[tokens, columns].transpose((1, 0))[...] = result
        return
    index = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    for i in range(spec.sizes.tokens):
        row = jnp.where(index == i, result, 0.0).sum(axis=1)
        out.at[i, columns][...] = row.astype(out.dtype)


def _kernel(spec: _Spec, x: Ref, w: Ref, out: Ref, scratch: _Scratch) -> None:
    launch_dependents()
    tile, warpgroup = _cta_tile(spec), lax.axis_index("warpgroup")

    @pl.when(warpgroup == spec.config.warpgroups)
    def _memory() -> None:
        _memory_warpgroup(spec, tile, x, w, scratch)

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        target = out if spec.config.split_k == 1 else out.at[lax.axis_index("split")]
        _compute_warpgroup(spec, tile, warpgroup, target, scratch)


def _scratch_types(spec: _Spec) -> _Scratch:
    config, dtype = spec.config, spec.sizes.dtype
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, MMA_COLUMNS)), swizzle(128))
    weights = (config.stages, spec.halves, config.block_k, config.block_n)
    tokens = (config.stages, spec.token_rows, config.block_k)
    return _Scratch(
        w_smem=plgpu.SMEM(weights, dtype, transforms=swizzled),
        x_smem=plgpu.SMEM(tokens, dtype, transforms=swizzled),
        barriers=plgpu.Barrier(num_arrivals=spec.halves + 1, num_barriers=config.stages),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
    )


@jax.jit  # one trace, one kernel for all layers
def skinny_gemm(args: GemmArgs) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``skinny_gemm.api``."""
    return launch_with(choose_config(sizes_of(args)), args)


def launch_with(config: GemmConfig, args: GemmArgs) -> jax.Array:  # [T, O], or float32[S, T, O]
    """``skinny_gemm`` with a given configuration; the tuner calls it too.

    Raises ValueError when the configuration does not fit the call.
    """
    sizes = sizes_of(args)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    return plgpu.kernel(
        partial(_kernel, spec),
        out_type=result_shape(config, sizes),
        scratch_types=(_scratch_types(spec),),
        grid=(config.split_k, sizes.outer // config.block_n),  # adjacent CTAs, adjacent columns
        grid_names=("split", "tile"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="skinny_gemm",
    )(args.x, args.w)
