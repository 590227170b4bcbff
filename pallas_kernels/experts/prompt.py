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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_device
from pallas_kernels.experts.call import call_kernel
from pallas_kernels.experts.decode import activated, in_one_warp
from pallas_kernels.experts.launch import GemmSizes, PromptConfig
from pallas_kernels.pdl import grid_dependency_wait, launch_dependents

MMA_ROWS = 64  # M of a wgmma
LANES = 64  # inputs of a swizzled tile
# Per thread of two compute warpgroups: 504 of the 512 registers that three warpgroups may use.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40

type Ref = Any


@dataclass(frozen=True)
class Spec:
    """Compile-time constants of the kernel."""

    sizes: GemmSizes
    config: PromptConfig

    @property
    def warpgroups(self) -> int:
        """Compute warpgroups."""
        return self.sizes.width // MMA_ROWS

    @property
    def num_steps(self) -> int:
        """K steps of an item."""
        return self.sizes.inner // self.config.block_k

    @property
    def blocks(self) -> int:
        """Items of a tile of rows."""
        return self.sizes.outer // self.config.block_n

    @property
    def ctas(self) -> int:
        """Number of resident CTAs."""
        return min(current_device().num_sms, self.sizes.tiles * self.blocks)


class Gmem(NamedTuple):
    """Refs to arrays in global memory; None where a call has none."""

    x: Ref  # [N * width, K]
    expert: Ref  # int32[N]
    used: Ref  # int32[1]: tiles in use
    w: Ref  # [E, halves, O, K], or None: quantised
    bias: Ref  # [E, halves, O]
    out: Ref  # [N * width, O]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    out_smem: Ref  # [warpgroups, 64, store_n]
    w_smem: Ref  # [stages, halves * block_n, block_k]
    x_smem: Ref  # [stages, width, block_k]
    lead_barrier: Ref  # the first compute warpgroup is ``lead`` steps ahead of the second
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    barriers: Ref  # [stages]: one arrival per copy


class Item(NamedTuple):
    """A CTA's item; int32 scalars."""

    tile: jax.Array
    first_output: jax.Array
    first_step: jax.Array  # among all K steps of the CTA


def num_items(spec: Spec, gmem: Gmem) -> jax.Array:
    """Number of items that the CTA computes; items are dealt out in turn."""
    others = gmem.used[0] * spec.blocks - 1 - lax.axis_index("cta")
    return lax.div(others + spec.ctas, jnp.int32(spec.ctas))


def item_at(spec: Spec, gmem: Gmem, i: jax.Array | int) -> Item:
    """The CTA's i-th item. CTAs compute a few tiles' blocks at a time, for reuse in L2."""
    index, group = i * spec.ctas + lax.axis_index("cta"), spec.config.group
    first = lax.div(index, jnp.int32(group * spec.blocks)) * group
    rest = index - first * spec.blocks
    height = jnp.minimum(gmem.used[0] - first, group)
    block = lax.div(rest, height)
    tile = first + rest - block * height
    return Item(tile, block * spec.config.block_n, jnp.int32(i * spec.num_steps))


def stage_of(spec: Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def copy_items(
    spec: Spec,
    gmem: Gmem,
    scratch: Any,  # x_smem and barriers as in ``_Scratch``
    copy_weights: Callable[[Item, jax.Array, jax.Array, jax.Array], None],
) -> None:
    """Copy the K steps of all items as stages are consumed; ``copy_weights`` takes an item, its
    expert, a step and its stage.
    """
    config, width = spec.config, spec.sizes.width
    items = num_items(spec, gmem)

    @pl.loop(0, items)
    def _next(i: jax.Array) -> None:
        item = item_at(spec, gmem, i)
        expert = gmem.expert[item.tile]

        @pl.loop(0, spec.num_steps)
        def _copy(step: jax.Array) -> None:
            number = item.first_step + step
            stage = stage_of(spec, number)
            consumed = scratch.consumed_barriers.at[stage]
            pl.when(number >= config.stages)(lambda: plgpu.barrier_wait(consumed))
            copy_weights(item, expert, step, stage)
            inputs = pl.ds(step * config.block_k, config.block_k)
            rows = gmem.x.at[pl.ds(item.tile * width, width), inputs]
            plgpu.copy_gmem_to_smem(rows, scratch.x_smem.at[stage], scratch.barriers.at[stage])

    # A CTA must not exit while a barrier has a phase that was not waited for.
    total = items * spec.num_steps

    @pl.loop(jnp.maximum(total - config.stages, 0), total)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch.consumed_barriers.at[stage_of(spec, step)])


def _copy_all(spec: Spec, gmem: Gmem, scratch: _Scratch) -> None:
    """Copy the K steps of all items."""
    block_n, block_k = spec.config.block_n, spec.config.block_k

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        outputs, inputs = pl.ds(item.first_output, block_n), pl.ds(step * block_k, block_k)
        for half in range(spec.sizes.halves):
            w_smem = scratch.w_smem.at[stage, pl.ds(half * block_n, block_n)]
            weights = gmem.w.at[expert, half, outputs, inputs]
            plgpu.copy_gmem_to_smem(weights, w_smem, scratch.barriers.at[stage])

    copy_items(spec, gmem, scratch, copy_weights)


def _matmul(
    spec: Spec, item: Item, warpgroup: jax.Array, scratch: _Scratch
) -> jax.Array:  # float32[64, halves * block_n]
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""

    def release(step: jax.Array | int) -> None:
        plgpu.barrier_arrive(scratch.consumed_barriers.at[stage_of(spec, item.first_step + step)])

    def multiply(acc: Ref) -> jax.Array:
        lead = spec.config.lead if spec.warpgroups > 1 else 0
        if lead:
            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(scratch.lead_barrier))

        @pl.loop(0, spec.num_steps)
        def _step(step: jax.Array) -> None:
            stage = stage_of(spec, item.first_step + step)
            plgpu.barrier_wait(scratch.barriers.at[stage])
            x = scratch.x_smem.at[stage, pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)]
            plgpu.wgmma(acc, x, scratch.w_smem.at[stage].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # wait for the previous step
            pl.when(step > 0)(lambda: release(step - 1))
            if lead:
                pl.when((warpgroup == 0) & (step == lead - 1))(
                    lambda: plgpu.barrier_arrive(scratch.lead_barrier)
                )

        return acc[...]

    shape = (MMA_ROWS, spec.sizes.halves * spec.config.block_n)
    products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    release(spec.num_steps - 1)
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
            expert, outputs = gmem.expert[item.tile], pl.ds(item.first_output, block_n)
            bias = plgpu.load(
                gmem.bias.at[expert, half, outputs],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            result += lax.broadcast_in_dim(bias.astype(jnp.float32), result.shape, [1])
        found.append(result)
    return found


def _compute_warpgroup(spec: Spec, warpgroup: jax.Array, gmem: Gmem, scratch: _Scratch) -> None:
    """The warpgroup's rows of all items of the CTA."""
    out_smem, activation = scratch.out_smem.at[warpgroup], spec.sizes.activation
    store_n = spec.config.store_n

    @pl.loop(0, num_items(spec, gmem))
    def _next(i: jax.Array) -> None:
        item = item_at(spec, gmem, i)
        results = _halves(spec, gmem, item, _matmul(spec, item, warpgroup, scratch))
        result = results[0] if activation is None else activated(activation, *results)
        rows = pl.ds(item.tile * spec.sizes.width + warpgroup * MMA_ROWS, MMA_ROWS)
        for start in range(0, spec.config.block_n, store_n):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous results have been read
            out_smem[...] = result[:, start : start + store_n].astype(gmem.out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(item.first_output + start, store_n)
            plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[rows, columns])

    plgpu.wait_smem_to_gmem(0)


def _kernel(spec: Spec, gmem: Gmem, scratch: _Scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    grid_dependency_wait()
    launch_dependents()

    @pl.when(warpgroup == spec.warpgroups)
    def _memory() -> None:
        if spec.warpgroups > 1:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        in_one_warp(lambda: _copy_all(spec, gmem, scratch))

    @pl.when(warpgroup < spec.warpgroups)
    def _compute() -> None:
        if spec.warpgroups > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _compute_warpgroup(spec, warpgroup, gmem, scratch)


def _scratch_types(spec: Spec) -> _Scratch:
    config, sizes, dtype = spec.config, spec.sizes, jnp.dtype(spec.sizes.dtype)
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform

    def swizzled(lanes: int) -> Any:
        return tiling((8, lanes)), swizzle(lanes * dtype.itemsize)

    weights = (config.stages, sizes.halves * config.block_n, config.block_k)
    return _Scratch(
        out_smem=plgpu.SMEM(
            (spec.warpgroups, MMA_ROWS, config.store_n), dtype, transforms=swizzled(config.lanes)
        ),
        w_smem=plgpu.SMEM(weights, dtype, transforms=swizzled(LANES)),
        x_smem=plgpu.SMEM(
            (config.stages, sizes.width, config.block_k), dtype, transforms=swizzled(LANES)
        ),
        barriers=plgpu.Barrier(num_arrivals=sizes.halves + 1, num_barriers=config.stages),
        consumed_barriers=plgpu.Barrier(num_arrivals=spec.warpgroups, num_barriers=config.stages),
        lead_barrier=plgpu.Barrier(),
    )


def launch_with(
    config: PromptConfig,
    sizes: GemmSizes,
    arrays: dict[str, jax.Array | None],  # the arguments of ``Gmem`` but ``out``, by name
) -> jax.Array:  # [N * width, O]
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = Spec(sizes, config)
    return call_kernel(
        partial(_kernel, spec),
        Gmem,
        arrays,
        out_type=jax.ShapeDtypeStruct((sizes.tiles * sizes.width, sizes.outer), sizes.dtype),
        scratch_types=_scratch_types(spec),
        ctas=spec.ctas,
        warpgroups=spec.warpgroups,
        name="experts_gate_up_prompt" if sizes.halves == 2 else "experts_down_prompt",
    )
