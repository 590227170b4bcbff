"""norm_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x), of one token.

A GEMM of one token waits for its weights, and the norm before it for the previous GEMM; with one
launch for each, memory idles in between. Here every CTA computes the residual add and the norm
itself, redundantly, while its first weights are in flight. The GEMM is that of ``skinny_gemm``: one
memory warpgroup issues TMA copies of weights many K steps ahead, one compute warpgroup multiplies,
transposed, so M of a wgmma are 64 columns of weights.

N of a wgmma is at least 8 tokens, in swizzled tiles [8, 64]. The swizzle does not move the first
row of such a tile. So the token is written there through an unswizzled view, and the other rows,
whose results are not used, are not initialised.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_gemm.launch import (
    COLUMNS,
    MIN_STAGES,
    TOKEN_ROWS,
    NormGemmConfig,
    NormGemmSizes,
    choose_config,
    sizes_of,
)
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.pdl import launch_dependents
from pallas_kernels.residual_norm import token

type Ref = Any


class _Spec(NamedTuple):
    """Compile-time constants of the kernel."""

    sizes: NormGemmSizes
    config: NormGemmConfig
    norm: token.Norm
    dtype: Any

    @property
    def halves(self) -> int:
        """2 with swiglu (gate and up), else 1."""
        return 1 + self.sizes.swiglu

    @property
    def tiles(self) -> int:
        """Tiles of the token."""
        return self.sizes.inner // COLUMNS

    @property
    def num_steps(self) -> int:
        """K steps of a CTA."""
        return self.sizes.inner // self.config.block_k


class _GmemRefs(NamedTuple):
    """Refs to the arrays in global memory."""

    token: token.NormRefs  # in tiles of COLUMNS
    w: Ref  # [D, O]; with swiglu [D, 2 * O]
    out: Ref  # [1, O]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [tiles, TOKEN_ROWS, COLUMNS], see ``token.views``
    w_smem: Ref  # [stages, 1 or 2, block_k, COLUMNS]
    consumed_barriers: Ref  # [stages]
    barriers: Ref  # [stages]: one arrival per copy


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _memory_warpgroup(spec: _Spec, column: jax.Array, w: Ref, scratch: _Scratch) -> None:
    """Copy K steps of the weights, [D, O] or [D, 2 * O], as stages are consumed."""
    block_k, prologue = spec.config.block_k, min(spec.config.stages, spec.num_steps)

    def copy(step: jax.Array) -> None:
        stage = _stage(spec, step)
        for half in range(spec.halves):
            columns = pl.ds(half * spec.sizes.outer + column, COLUMNS)
            source = w.at[pl.ds(step * block_k, block_k), columns]
            w_smem, barrier = scratch.w_smem.at[stage, half], scratch.barriers.at[stage]
            plgpu.copy_gmem_to_smem(source, w_smem, barrier)

    pl.loop(0, prologue)(copy)

    @pl.loop(prologue, spec.num_steps)
    def _step(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])
        copy(step)


def _matmul(
    spec: _Spec,
    x_smem: Ref,  # [tiles, TOKEN_ROWS, COLUMNS], swizzled
    scratch: _Scratch,
) -> tuple[jax.Array, ...]:  # float32[COLUMNS, TOKEN_ROWS], one for each half
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""
    tiles = spec.config.block_k // COLUMNS  # of a step

    def multiply(*accs: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, spec.num_steps)
        def _step(step: jax.Array) -> None:
            stage = _stage(spec, step)
            plgpu.barrier_wait(scratch.barriers.at[stage])
            for tile in range(tiles):
                x = x_smem.at[step * tiles + tile].transpose((1, 0))
                rows = pl.ds(tile * COLUMNS, COLUMNS)
                for half, acc in enumerate(accs):
                    w = scratch.w_smem.at[stage, half, rows].transpose((1, 0))
                    plgpu.wgmma(acc, w, x)
            plgpu.wgmma_wait(spec.halves * tiles)  # wait for the previous step

            # The stages of the last steps are not reused, so no copy waits for their release.
            @pl.when((step > 0) & (step - 1 + spec.config.stages < spec.num_steps))
            def _release() -> None:
                plgpu.barrier_arrive(scratch.consumed_barriers.at[_stage(spec, step - 1)])

        return tuple(acc[...] for acc in accs)

    accs = [plgpu.WGMMAAccumulatorRef((COLUMNS, TOKEN_ROWS), jnp.float32)] * spec.halves
    return pl.run_scoped(multiply, *accs)


def _compute_warpgroup(spec: _Spec, column: jax.Array, gmem: _GmemRefs, scratch: _Scratch) -> None:
    """Residual add, norm, and 64 columns of the result. The first CTA also writes the sum."""
    plain, swizzled = token.views(scratch.x_smem)
    found = token.normed_token(spec.norm, gmem.token)
    for span, normed in zip(found.spans, found.normed, strict=True):
        plain[span, 0, :] = normed
    plgpu.commit_smem()

    pl.when(column == 0)(partial(token.write_total, found, gmem.token))
    accs = _matmul(spec, swizzled, scratch)
    result = accs[0]
    if spec.sizes.swiglu:
        result = result / (1.0 + jnp.exp(-result)) * accs[1]
    row = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    result = jnp.where(row == 0, result, 0.0).sum(axis=1)
    gmem.out[0, pl.ds(column, COLUMNS)] = result.astype(spec.dtype)


def _kernel(spec: _Spec, gmem: _GmemRefs, scratch: _Scratch) -> None:
    launch_dependents()
    column, warpgroup = lax.axis_index("tile") * COLUMNS, lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(partial(_compute_warpgroup, spec, column, gmem, scratch))
    pl.when(warpgroup == 1)(partial(_memory_warpgroup, spec, column, gmem.w, scratch))


def _scratch_types(spec: _Spec) -> _Scratch:
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((TOKEN_ROWS, COLUMNS)), swizzle(128))
    weights = (spec.config.stages, spec.halves, spec.config.block_k, COLUMNS)
    tiles = (spec.tiles, TOKEN_ROWS, COLUMNS)
    return _Scratch(
        w_smem=plgpu.SMEM(weights, spec.dtype, transforms=swizzled),
        x_smem=token.ref_union(
            plgpu.SMEM(tiles, spec.dtype), plgpu.SMEM(tiles, spec.dtype, transforms=swizzled)
        ),
        barriers=plgpu.Barrier(num_arrivals=spec.halves, num_barriers=spec.config.stages),
        consumed_barriers=plgpu.Barrier(num_barriers=spec.config.stages),
    )


@jax.jit  # one trace, one kernel for all layers
def norm_gemm(args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:  # [1, D], [1, O]
    """See ``norm_gemm.api``."""
    return launch_with(choose_config(sizes_of(args)), args)


def launch_with(
    config: NormGemmConfig, args: NormGemmArgs
) -> tuple[jax.Array, jax.Array]:  # [1, D], [1, O]
    """``norm_gemm`` with a given configuration; tests call it too.

    Raises ValueError when the configuration has too few stages.
    """
    if config.stages < MIN_STAGES:
        raise ValueError(f"{config} has fewer than {MIN_STAGES} stages")
    sizes, norm = sizes_of(args), args.norm
    spec = _Spec(sizes, config, token.Norm(norm.row, norm.eps), norm.x.dtype)
    arrays, total_type = token.norm_arrays(norm, COLUMNS)

    def body(x: Ref, partials: Ref, norms: Ref, w: Ref, total: Ref, out: Ref, scratch: Any) -> None:
        refs = token.NormRefs(x, partials, norms, total)
        _kernel(spec, _GmemRefs(refs, w, out), scratch)

    total, out = plgpu.kernel(
        body,
        out_type=(total_type, jax.ShapeDtypeStruct((1, sizes.outer), spec.dtype)),
        scratch_types=(_scratch_types(spec),),
        grid=(sizes.outer // COLUMNS,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        # The automatic barriers would make all threads wait around each store. They are not
        # needed: no store is read before ``commit_smem``.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="norm_gemm",
    )(*arrays, args.w)
    return total.reshape(norm.x.shape), out
