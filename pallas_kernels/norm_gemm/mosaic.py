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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import geglu, load_bias, plus_bias, swiglu, write_rows
from pallas_kernels.gemm.pipeline import Ring, copy_steps, launch, matmul
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.lib.pdl import launch_dependents
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
    def num_steps(self) -> int:
        """K steps of a CTA."""
        return self.sizes.inner // self.config.block_k


class _Gmem(NamedTuple):
    """Refs to the arrays in global memory."""

    token: token.NormRefs  # in tiles of COLUMNS
    w: Ref  # [D, O]; with swiglu [D, 2 * O]
    bias: Ref  # [O], or None


def _memory_warpgroup(spec: _Spec, column: jax.Array, w: Ref, ring: Ring, scratch: Scratch) -> None:
    """Copy K steps of the weights, [D, O] or [D, 2 * O]."""
    block_k = spec.config.block_k

    def copy(step: jax.Array) -> None:
        stage = ring.stage(step)
        for half in range(spec.halves):
            columns = pl.ds(half * spec.sizes.outer + column, COLUMNS)
            source = w.at[pl.ds(step * block_k, block_k), columns]
            w_smem, barrier = scratch.w_smem.at[stage, half], ring.barriers.at[stage]
            plgpu.copy_gmem_to_smem(source, w_smem, barrier)

    copy_steps(ring, spec.num_steps, copy, waits=False)


def _compute_warpgroup(
    spec: _Spec,
    column: jax.Array,
    gmem: _Gmem,
    results: tuple[Ref, Ref],  # the sum, [tiles, COLUMNS], and [1, O]
    ring: Ring,
    scratch: Scratch,
) -> None:
    """Residual add, norm, and 64 columns of the result. The first CTA also writes the sum."""
    total, out = results
    plain, swizzled = token.views(scratch.token_smem)
    bias = load_bias(gmem.bias, pl.ds(column, COLUMNS))
    found = token.normed_token(spec.norm, gmem.token)
    for span, normed in zip(found.spans, found.normed, strict=True):
        plain[span, 0, :] = normed
    plgpu.commit_smem()
    pl.when(column == 0)(partial(token.write_total, found, total))
    tiles = spec.config.block_k // COLUMNS  # of a step

    def issue(step: jax.Array, stage: jax.Array, accs: Any) -> int:
        for tile in range(tiles):
            x = swizzled.at[step * tiles + tile].transpose((1, 0))
            rows = pl.ds(tile * COLUMNS, COLUMNS)
            for half, acc in enumerate(accs):
                w = scratch.w_smem.at[stage, half, rows].transpose((1, 0))
                plgpu.wgmma(acc, w, x)
        return spec.halves * tiles

    release = partial(ring.release_previous_if_reused, num_steps=spec.num_steps)
    shape = (COLUMNS, TOKEN_ROWS)
    accs = matmul(ring, spec.num_steps, shape, issue, release, count=spec.halves)
    result = plus_bias(accs[0], bias)
    if spec.sizes.swiglu:
        result = (geglu if spec.sizes.gelu else swiglu)(*accs)
    write_rows(out, 1, pl.ds(column, COLUMNS), result)


def _kernel(spec: _Spec, gmem: _Gmem, results: tuple[Ref, Ref], scratch: Scratch) -> None:
    launch_dependents()
    column, warpgroup = lax.axis_index("tile") * COLUMNS, lax.axis_index("warpgroup")
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    compute = partial(_compute_warpgroup, spec, column, gmem, results, ring, scratch)
    pl.when(warpgroup == 0)(compute)
    pl.when(warpgroup == 1)(partial(_memory_warpgroup, spec, column, gmem.w, ring, scratch))


def _scratch_types(spec: _Spec) -> Scratch:
    stages, dtype = spec.config.stages, spec.dtype
    tiles = (spec.sizes.inner // COLUMNS, TOKEN_ROWS, COLUMNS)
    return Scratch(
        token_smem=token.ref_union(plgpu.SMEM(tiles, dtype), smem(tiles, dtype, COLUMNS)),
        w_smem=smem((stages, spec.halves, spec.config.block_k, COLUMNS), dtype, COLUMNS),
        **stage_barriers(stages, spec.halves, 1),
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

    total, out = launch(
        "norm_gemm",
        partial(_kernel, spec),
        _Gmem(arrays, args.w, args.bias),
        out_type=(total_type, jax.ShapeDtypeStruct((1, sizes.outer), spec.dtype)),
        scratch=_scratch_types(spec),
        grid={"tile": sizes.outer // COLUMNS},
        warpgroups=2,
        auto_barriers=False,
    )
    return total.reshape(norm.x.shape), out
