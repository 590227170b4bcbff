"""The GEMMs of experts for many tokens with weights in tiles (``quantised_gemm.tiled``).

The persistent kernel of ``prompt`` with the K steps of ``quantised_gemm.tiled.step``, as in
``quantised_gemm.tiled.large``: outputs are M of a wgmma, rows N, and each of two compute warpgroups
multiplies 64 outputs: gates and ups, or adjacent outputs. One makes its operand while the other
one's matmul runs. The second one passes its ups to the first one through shared memory. The sums of
inputs that offsets multiply are computed before, by XLA.
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

from pallas_kernels.experts import prompt
from pallas_kernels.experts.call import call_kernel
from pallas_kernels.experts.decode import activated, in_one_warp
from pallas_kernels.experts.launch import GemmSizes, QuantisedPromptConfig
from pallas_kernels.experts.prompt import COMPUTE_REGISTERS, MEMORY_REGISTERS, Item
from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.tiled import step as tiled
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.large.launch import PAIR

type Ref = Any


@dataclass(frozen=True)
class _Spec(prompt.Spec):
    """Compile-time constants of the kernel. An item's ``first_output`` is that of its pair."""

    config: QuantisedPromptConfig  # type: ignore[assignment]

    @property
    def step(self) -> tiled.Spec:
        """Those of a K step."""
        sizes = self.sizes.tiled
        return tiled.Spec(sizes, self.config.step, sums_given=sizes.offsets)

    @property
    def tiles(self) -> int:
        """Tiles of outputs of each half."""
        return self.sizes.outer // TILE

    @property
    def blocks(self) -> int:
        """Items of a tile of rows: pairs of tiles of outputs; the last one may be half empty."""
        return -(-self.tiles * self.sizes.halves // PAIR)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [stages, width, block_k]
    values_smem: Ref  # [stages, 2, tiles, rows, ROW_BYTES]
    parts_smem: tiled.Parts  # [stages, padding, 2, groups, 64] each
    sums_given_smem: Ref  # float32[stages, groups, width]; None without offsets
    ups_smem: Ref  # float32[64, width]
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    ups_barrier: Ref
    ups_consumed_barrier: Ref


def _copy_all(
    spec: _Spec,
    gmem: prompt.Gmem,
    views: tiled.Gmem,
    sums: Ref,  # float32[groups, N * width], None without offsets
    scratch: _Scratch,
) -> None:
    """Copy the K steps of all items."""
    width = spec.sizes.width

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        pair = lax.div(item.first_output, jnp.int32(spec.config.block_n))
        if spec.sizes.halves == 2:
            where: Any = (pl.ds(expert * PAIR, PAIR), pair)
        else:
            where = (expert, pl.ds(pair * PAIR, PAIR))  # a missing tile becomes zeros
        tiled.copy_weights(spec.step, views, scratch, where, step, stage)
        rows = pl.ds(item.tile * width, width)
        tiled.copy_sums(spec.step, sums, scratch, rows, step, stage)

    prompt.copy_items(spec, gmem, scratch, copy_weights)


def _first_output(spec: _Spec, item: Item, warpgroup: jax.Array) -> jax.Array:
    """The first output of a warpgroup's tile, which may be missing in the last item."""
    return item.first_output + (0 if spec.sizes.halves == 2 else warpgroup * TILE)


def _accumulate(
    spec: _Spec,
    item: Item,
    warpgroup: jax.Array,
    gmem: prompt.Gmem,
    scales: Ref,
    scratch: _Scratch,
) -> jax.Array:  # float32[64, width]
    """The products of the warpgroup's tile of outputs."""
    expert, first_output = gmem.expert[item.tile], _first_output(spec, item, warpgroup)

    def add(step: jax.Array, totals: Any) -> Any:
        stage = prompt.stage_of(spec, item.first_step + step)
        k_step = tiled.Step(spec.step, stage, warpgroup, scratch)
        k_step = k_step.with_block_scales(scales, expert, first_output, step)
        plgpu.barrier_wait(scratch.barriers.at[stage])
        totals = k_step.add(totals)
        plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])
        return totals

    (total,) = lax.fori_loop(0, spec.num_steps, add, [tiled.zeros((TILE, spec.sizes.width))])
    return total


def _with_bias(
    gmem: prompt.Gmem, item: Item, half: jax.Array | int, first_output: jax.Array, total: jax.Array
) -> jax.Array:  # float32[64, width]
    if gmem.bias is None:
        return total
    ref = gmem.bias.at[gmem.expert[item.tile], half, pl.ds(first_output, TILE)]
    bias = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return total + lax.broadcast_in_dim(bias.astype(jnp.float32), total.shape, [0])


def _write(
    spec: _Spec, gmem: prompt.Gmem, item: Item, first_output: jax.Array, result: jax.Array
) -> None:
    """Write 64 outputs of all rows of the tile, in use or not."""
    rows = pl.ds(item.tile * spec.sizes.width, spec.sizes.width)
    # A register holds two adjacent outputs of a row instead of two rows.
    result = plgpu.layout_cast(result.astype(gmem.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    gmem.out.at[rows, pl.ds(first_output, TILE)].transpose((1, 0))[...] = result


def _compute_warpgroup(
    spec: _Spec, warpgroup: jax.Array, gmem: prompt.Gmem, scales: Ref, scratch: _Scratch
) -> None:
    """The warpgroup's tile of outputs of all items of the CTA."""
    activation = spec.sizes.activation

    def share(i: jax.Array, ups: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch.ups_consumed_barrier))
        scratch.ups_smem[...] = ups
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.ups_barrier)

    def write_activated(item: Item, gates: jax.Array) -> None:
        plgpu.barrier_wait(scratch.ups_barrier)
        ups = plgpu.load(scratch.ups_smem)
        plgpu.barrier_arrive(scratch.ups_consumed_barrier)
        assert activation is not None
        _write(spec, gmem, item, item.first_output, activated(activation, gates, ups))

    def write_plain(item: Item, first_output: jax.Array, total: jax.Array) -> None:
        total = _with_bias(gmem, item, 0, first_output, total)
        _write(spec, gmem, item, first_output, total)

    items = prompt.num_items(spec, gmem)

    @pl.loop(0, items)
    def _next(i: jax.Array) -> None:
        item = prompt.item_at(spec, gmem, i)
        total = _accumulate(spec, item, warpgroup, gmem, scales, scratch)
        if spec.sizes.halves == 2:
            total = _with_bias(gmem, item, warpgroup, item.first_output, total)
            pl.when(warpgroup == 1)(partial(share, i, total))
            pl.when(warpgroup == 0)(partial(write_activated, item, total))
            return
        first_output = _first_output(spec, item, warpgroup)
        pl.when(first_output < spec.sizes.outer)(partial(write_plain, item, first_output, total))

    if spec.sizes.halves == 2:  # the last ups have been read
        pl.when((warpgroup == 1) & (items > 0))(
            lambda: plgpu.barrier_wait(scratch.ups_consumed_barrier)
        )


def _kernel(
    spec: _Spec, gmem: prompt.Gmem, views: tiled.Gmem, sums: Ref, scratch: _Scratch
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    grid_dependency_wait()
    launch_dependents()

    @pl.when(warpgroup == PAIR)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        in_one_warp(lambda: _copy_all(spec, gmem, views, sums, scratch))

    @pl.when(warpgroup < PAIR)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _compute_warpgroup(spec, warpgroup, gmem, views.parts.scales, scratch)


def _scratch_types(spec: _Spec, parts: tiled.Parts) -> _Scratch:
    """``parts`` are the factors of all experts, see ``tiled.gmem_views``."""
    config, width, offsets = spec.config, spec.sizes.width, spec.sizes.tiled.offsets
    values, parts_smem = tiled.weight_types(spec.step, parts, PAIR)
    sums = (config.stages, config.step.rows(spec.sizes.tiled.group), width)
    return _Scratch(
        x_smem=plgpu.SMEM(
            (config.stages, width, config.block_k),
            jnp.bfloat16,
            transforms=tiled.swizzled(spec.step.chunk, 2),
        ),
        values_smem=values,
        parts_smem=parts_smem,
        sums_given_smem=plgpu.SMEM(sums, jnp.float32) if offsets else None,
        ups_smem=plgpu.SMEM(
            (TILE, width if spec.sizes.halves == 2 else 32),
            jnp.float32,
            transforms=tiled.swizzled(32, 4),
        ),
        barriers=plgpu.Barrier(
            num_arrivals=2 + sum(part is not None for part in parts_smem) + offsets,
            num_barriers=config.stages,
        ),
        consumed_barriers=plgpu.Barrier(num_arrivals=PAIR, num_barriers=config.stages),
        ups_barrier=plgpu.Barrier(),
        ups_consumed_barrier=plgpu.Barrier(),
    )


def launch_with(
    config: QuantisedPromptConfig,
    sizes: GemmSizes,
    arrays: dict[str, jax.Array | None],  # the arguments of ``prompt.Gmem`` but w and out, by name
    stack: Quantised,
) -> jax.Array:  # [N * width, O]
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    values, parts = tiled.gmem_views(sizes.tiled, stack, sizes.experts)
    used = [part for part in parts if part is not None]
    if sizes.tiled.offsets:
        x = arrays["x"]
        assert x is not None
        used.append(tiled.input_sums(x, sizes.tiled.group))

    def kernel(gmem: prompt.Gmem, scratch: Any, values: Any, *factors: Any) -> None:
        *rest, sums = factors if sizes.tiled.offsets else (*factors, None)
        _kernel(spec, gmem, tiled.Gmem(None, values, parts.named(rest), None), sums, scratch)

    return call_kernel(
        kernel,
        prompt.Gmem,
        arrays,
        (values, *used),
        out_type=jax.ShapeDtypeStruct((sizes.tiles * sizes.width, sizes.outer), sizes.dtype),
        scratch_types=_scratch_types(spec, parts),
        ctas=spec.ctas,
        warpgroups=PAIR,
        name=f"experts_{'gate_up' if sizes.halves == 2 else 'down'}_prompt_quantised",
    )
