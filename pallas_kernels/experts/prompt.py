"""The GEMMs of experts for many tokens, in Pallas Mosaic GPU, for NVIDIA Hopper.

A persistent kernel with the structure of ``swiglu_gemm``: a CTA computes item after item, an item
being a block of outputs of one tile of 64 or 128 sorted rows. One warp of the memory warpgroup
issues TMA copies of rows and weights, several K steps ahead and on into the next item. Each compute
warpgroup multiplies 64 rows with all columns of the block. In shared memory a block's gates are
next to its ups, so one wgmma multiplies both, and a thread has the gate and the up of a result in
its own registers. Tiles are whole, so TMA writes whole tiles; the rows of a tile that are not in
use hold anything, and only themselves depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.items import Gmem, Item, Spec, activated, launch_items, load_bias
from pallas_kernels.experts.launch import GemmSizes, PromptConfig
from pallas_kernels.gemm.pipeline import Ring, divide_roles, in_one_warp, matmul
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents

MMA_ROWS = 64  # M of a wgmma
LANES = 64  # inputs of a swizzled tile

type Ref = Any


def item_at(spec: Spec, gmem: Gmem, i: jax.Array | int) -> Item:
    """The CTA's i-th item. CTAs compute a few tiles' blocks at a time, for reuse in L2."""
    index, group = i * spec.ctas + lax.axis_index("cta"), spec.config.group
    first = lax.div(index, jnp.int32(group * spec.blocks)) * group
    rest = index - first * spec.blocks
    height = jnp.minimum(gmem.used[0] - first, group)
    block = lax.div(rest, height)
    tile = first + rest - block * height
    return Item(tile, block * spec.config.block_n, jnp.int32(i * spec.num_steps))


def copy_items(
    spec: Spec,
    gmem: Gmem,
    ring: Ring,
    x_smem: Ref,
    copy_weights: Callable[[Item, jax.Array, jax.Array, jax.Array], None],
) -> None:
    """Copy the K steps of all items as stages are consumed; ``copy_weights`` takes an item, its
    expert, a step and its stage.
    """
    config, width = spec.config, spec.sizes.width
    items = spec.num_items(gmem.used)

    @pl.loop(0, items)
    def _next(i: jax.Array) -> None:
        item = item_at(spec, gmem, i)
        expert = gmem.expert[item.tile]

        @pl.loop(0, spec.num_steps)
        def _copy(step: jax.Array) -> None:
            number = item.first_step + step
            stage = ring.stage(number)
            consumed = ring.consumed_barriers.at[stage]
            pl.when(number >= config.stages)(lambda: plgpu.barrier_wait(consumed))
            copy_weights(item, expert, step, stage)
            inputs = pl.ds(step * config.block_k, config.block_k)
            rows = gmem.x.at[pl.ds(item.tile * width, width), inputs]
            plgpu.copy_gmem_to_smem(rows, x_smem.at[stage], ring.barriers.at[stage])

    ring.drain(items * spec.num_steps)


def _copy_all(spec: Spec, gmem: Gmem, ring: Ring, scratch: Scratch) -> None:
    """Copy the K steps of all items."""
    block_n, block_k = spec.config.block_n, spec.config.block_k

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        outputs, inputs = pl.ds(item.first_output, block_n), pl.ds(step * block_k, block_k)
        for half in range(spec.sizes.halves):
            w_smem = scratch.w_smem.at[stage, pl.ds(half * block_n, block_n)]
            weights = gmem.w.at[expert, half, outputs, inputs]
            plgpu.copy_gmem_to_smem(weights, w_smem, ring.barriers.at[stage])

    copy_items(spec, gmem, ring, scratch.x_smem, copy_weights)


def _matmul(
    spec: Spec, item: Item, warpgroup: jax.Array, ring: Ring, scratch: Scratch
) -> jax.Array:  # float32[64, halves * block_n]
    """The warpgroup's products of an item."""
    lead, first = spec.config.lead if spec.sizes.width > MMA_ROWS else 0, item.first_step

    def wait_lead() -> None:
        if lead:
            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(scratch.lead_barrier))

    def issue(_: jax.Array, stage: jax.Array, accs: Sequence[Ref]) -> int:
        x = scratch.x_smem.at[stage, pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)]
        plgpu.wgmma(accs[0], x, scratch.w_smem.at[stage].transpose((1, 0)))
        return 1

    def release(step: jax.Array) -> None:
        pl.when(step > 0)(lambda: ring.release(first + (step - 1)))
        if lead:
            pl.when((warpgroup == 0) & (step == lead - 1))(
                lambda: plgpu.barrier_arrive(scratch.lead_barrier)
            )

    shape, steps = (MMA_ROWS, spec.sizes.halves * spec.config.block_n), spec.num_steps
    (products,) = matmul(ring, steps, shape, issue, release, first_step=first, before=wait_lead)
    ring.release(first + (spec.num_steps - 1))
    return products


def _halves(
    spec: Spec, gmem: Gmem, item: Item, products: jax.Array
) -> list[jax.Array]:  # float32[64, block_n] each
    """The products of each half, with biases if there are any."""
    block_n = spec.config.block_n
    found = []
    for half in range(spec.sizes.halves):
        result = products[:, half * block_n : (half + 1) * block_n]
        if gmem.bias is not None:
            bias = load_bias(gmem, item, half, pl.ds(item.first_output, block_n), 0)
            result += lax.broadcast_in_dim(bias, result.shape, [1])
        found.append(result)
    return found


def _compute_warpgroup(
    spec: Spec, gmem: Gmem, ring: Ring, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's rows of all items of the CTA."""
    out_smem, activation = scratch.out_smem.at[warpgroup], spec.sizes.activation
    store_n = spec.config.store_n

    @pl.loop(0, spec.num_items(gmem.used))
    def _next(i: jax.Array) -> None:
        item = item_at(spec, gmem, i)
        results = _halves(spec, gmem, item, _matmul(spec, item, warpgroup, ring, scratch))
        result = results[0] if activation is None else activated(activation, *results)
        rows = pl.ds(item.tile * spec.sizes.width + warpgroup * MMA_ROWS, MMA_ROWS)
        for start in range(0, spec.config.block_n, store_n):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous results have been read
            out_smem[...] = result[:, start : start + store_n].astype(gmem.out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(item.first_output + start, store_n)
            plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[rows, columns])

    plgpu.wait_smem_to_gmem(0)


def _kernel(spec: Spec, gmem: Gmem, scratch: Scratch) -> None:
    warpgroup, warpgroups = lax.axis_index("warpgroup"), spec.sizes.width // MMA_ROWS
    grid_dependency_wait()
    launch_dependents()
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        warpgroups,
        lambda: in_one_warp(lambda: _copy_all(spec, gmem, ring, scratch)),
        partial(_compute_warpgroup, spec, gmem, ring, scratch),
        moves_registers=warpgroups > 1,
        warpgroup=warpgroup,
    )


def _scratch_types(spec: Spec) -> Scratch:
    config, sizes, stages = spec.config, spec.sizes, spec.config.stages
    warpgroups, columns = sizes.width // MMA_ROWS, sizes.halves * config.block_n
    return Scratch(
        out_smem=smem((warpgroups, MMA_ROWS, config.store_n), sizes.dtype, config.lanes),
        w_smem=smem((stages, columns, config.block_k), sizes.dtype, LANES),
        x_smem=smem((stages, sizes.width, config.block_k), sizes.dtype, LANES),
        lead_barrier=plgpu.Barrier(),
        **stage_barriers(stages, sizes.halves + 1, warpgroups),
    )


def launch_with(config: PromptConfig, sizes: GemmSizes, gmem: Gmem) -> jax.Array:
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = Spec(sizes, config)
    return launch_items(
        "_prompt", _kernel, spec, gmem, _scratch_types(spec), sizes.width // MMA_ROWS
    )
