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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import (
    geglu,
    load_bias,
    plus_bias,
    swiglu,
    write_columns,
    write_rows,
)
from pallas_kernels.gemm.pipeline import Ring, copy_steps, divide_roles, launch, matmul
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.gemm.tiles import SplitTile, split_tile
from pallas_kernels.lib.pdl import launch_dependents
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


def _memory_warpgroup(
    spec: _Spec,
    tile: SplitTile,
    x: Ref,  # [T, I]
    w: Ref,  # [I, O]; with swiglu [I, 2 * O]
    ring: Ring,
    scratch: Scratch,
) -> None:
    """Copy the K steps."""
    block_n, block_k = spec.config.block_n, spec.config.block_k

    def inner(step: jax.Array) -> Any:
        return pl.ds((tile.first_step + step) * block_k, block_k)

    def copy_weights(step: jax.Array) -> None:
        stage = ring.stage(step)
        for half in range(spec.halves):
            columns = pl.ds(half * spec.sizes.outer + tile.output, block_n)
            w_smem, barrier = scratch.w_smem.at[stage, half], ring.barriers.at[stage]
            plgpu.copy_gmem_to_smem(w.at[inner(step), columns], w_smem, barrier)

    def copy_tokens(step: jax.Array) -> None:
        stage = ring.stage(step)
        tokens = x.at[pl.ds(0, spec.token_rows), inner(step)]  # TMA fills missing rows with zeros
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], ring.barriers.at[stage])

    copy_steps(ring, tile.num_steps, copy_weights, copy_tokens)


def _compute_warpgroup(
    spec: _Spec,
    tile: SplitTile,
    bias: Ref,  # [O], or None
    out: Ref,
    ring: Ring,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> None:
    """Compute the warpgroup's tile of the result, [T, O], and write it from registers."""
    width, count = spec.warpgroup_tile
    column, token = (warpgroup * width, 0) if spec.by_columns else (0, warpgroup * count)
    own_columns, tokens = pl.ds(column, width), pl.ds(token, count)
    columns = pl.ds(tile.output + column, width)
    addend = _addend(spec, bias, columns)

    def issue(_: jax.Array, stage: jax.Array, accs: Any) -> int:
        x = scratch.x_smem.at[stage, tokens].transpose((1, 0))
        for half, acc in enumerate(accs):
            w = scratch.w_smem.at[stage, half, :, own_columns].transpose((1, 0))
            plgpu.wgmma(acc, w, x)
        return spec.halves

    release = partial(ring.release_previous_if_reused, num_steps=tile.num_steps)
    shape = spec.warpgroup_tile
    accs = matmul(ring, tile.num_steps, shape, issue, release, count=spec.halves)
    result = plus_bias(accs[0], addend)
    if spec.sizes.swiglu:
        result = (geglu if spec.sizes.gelu else swiglu)(*accs)
    if spec.sizes.tokens >= MMA_TOKENS:
        return write_columns(out, tokens, columns, result)
    write_rows(out, spec.sizes.tokens, columns, result)


def _addend(spec: _Spec, bias: Ref, columns: Any) -> jax.Array | None:  # [columns]
    """The bias of some columns, if there is one: 0 for all split-K partials but the first."""
    addend = load_bias(bias, columns)
    if addend is None or spec.config.split_k == 1:
        return addend
    is_first = (lax.axis_index("split") == 0).astype(jnp.float32)
    return addend.astype(jnp.float32) * lax.broadcast_in_dim(is_first, addend.shape, [])


def _kernel(spec: _Spec, arrays: tuple[Ref, Ref, Ref], out: Ref, scratch: Scratch) -> None:
    config, (x, w, bias) = spec.config, arrays
    launch_dependents()
    tile = split_tile(spec.sizes.inner // config.block_k, config.split_k, config.block_n)
    ring = Ring(config.stages, scratch.barriers, scratch.consumed_barriers)

    def compute(warpgroup: jax.Array) -> None:
        target = out if config.split_k == 1 else out.at[lax.axis_index("split")]
        _compute_warpgroup(spec, tile, bias, target, ring, scratch, warpgroup)

    memory = partial(_memory_warpgroup, spec, tile, x, w, ring, scratch)
    divide_roles(config.warpgroups, memory, compute)


def _scratch_types(spec: _Spec) -> Scratch:
    config, dtype = spec.config, spec.sizes.dtype
    weights = (config.stages, spec.halves, config.block_k, config.block_n)
    return Scratch(
        w_smem=smem(weights, dtype, MMA_COLUMNS),
        x_smem=smem((config.stages, spec.token_rows, config.block_k), dtype, MMA_COLUMNS),
        **stage_barriers(config.stages, spec.halves + 1, config.warpgroups),
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
    return launch(
        "skinny_gemm",
        partial(_kernel, spec),
        (args.x, args.w, args.bias),
        out_type=result_shape(config, sizes),
        scratch=_scratch_types(spec),
        # adjacent CTAs, adjacent columns
        grid={"split": config.split_k, "tile": sizes.outer // config.block_n},
        warpgroups=config.warpgroups + 1,
    )
