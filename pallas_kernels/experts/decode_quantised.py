"""The GEMMs of experts for few tokens with weights in tiles (``quantised_gemm.tiled``).

The persistent kernel of ``decode`` with the K steps of ``quantised_gemm.tiled.step``. The compute
warpgroups divide the tiles of 64 outputs of an item among them. Those of one tile divide the inputs
of a step, or in ``gate_up`` half of them multiply gates, the others ups. At the end of an item the
others hand their sums to the first one of the tile, which writes the results while they go on with
the next item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts import decode
from pallas_kernels.experts.call import call_kernel
from pallas_kernels.experts.decode import Item, copy_items, in_one_warp, item_at, num_items
from pallas_kernels.experts.launch import GemmSizes, QuantisedConfig
from pallas_kernels.pdl import grid_dependency_wait
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.tiled import step as tiled
from pallas_kernels.quantised_gemm.tiled.arrange import TILE

type Ref = Any


@dataclass(frozen=True)
class _Spec(decode.Spec):
    """Compile-time constants of the kernel."""

    config: QuantisedConfig  # type: ignore[assignment]

    @property
    def blocks(self) -> int:
        """Items of a tile of tokens; tiles of outputs are missing in the last one, perhaps."""
        return -(-self.sizes.outer // self.config.block_n)

    @property
    def copies(self) -> int:
        """Copies of a K step's weights, and of each kind of factors."""
        return self.sizes.halves if self.config.outputs > 1 else 1

    @property
    def step(self) -> tiled.Spec:
        """Those of a K step."""
        return tiled.Spec(self.sizes.tiled, self.config.step)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [stages, columns, block_k]
    values_smem: Ref  # [stages, halves * outputs, tiles, rows, ROW_BYTES]
    parts_smem: tiled.Parts  # [stages, padding, halves * outputs, groups, 64] each
    sums_smem: Ref  # float32[outputs, warpgroups of a tile - 1, results, 64, columns]
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    sums_barriers: Ref  # [outputs]: one arrival per compute warpgroup of the tile but the first
    sums_consumed_barriers: Ref  # [outputs]


class _Role(NamedTuple):
    """A compute warpgroup's place; int32 scalars."""

    output: jax.Array  # its tile of outputs among those of an item
    member: jax.Array  # among the warpgroups of the tile

    @classmethod
    def of(cls, spec: _Spec, warpgroup: jax.Array) -> _Role:
        """The place of a warpgroup of the CTA."""
        outputs = jnp.int32(spec.config.outputs)
        return cls(lax.rem(warpgroup, outputs), lax.div(warpgroup, outputs))


@dataclass(frozen=True)
class _Step(tiled.Step):
    """Its part of a K step."""

    role: _Role
    outputs: int  # tiles of an item

    def half(self, result: int) -> jax.Array | int:
        """The tile of weights of one of the warpgroup's results."""
        if self.outputs == 1:
            return super().half(result)
        return result * self.outputs + self.role.output


def _copy_all(spec: _Spec, gmem: decode.Gmem, views: tiled.Gmem, scratch: _Scratch) -> None:
    """Copy the K steps of all items."""

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array) -> None:
        stage = decode.stage_of(spec, item.first_step + step)
        halves, outputs = spec.sizes.halves, spec.config.outputs
        tile = lax.div(item.first_output, jnp.int32(TILE))
        if outputs == 1:
            where: Any = (pl.ds(expert * halves, halves), tile)
            return tiled.copy_weights(spec.step, views, scratch, where, step, stage)
        for half in range(halves):  # a missing tile becomes zeros
            where, place = (
                (expert * halves + half, pl.ds(tile, outputs)),
                pl.ds(half * outputs, outputs),
            )
            tiled.copy_weights(spec.step, views, scratch, where, step, stage, place)

    copy_items(spec, gmem, scratch, copy_weights)


def _accumulate(
    spec: _Spec, item: Item, role: _Role, gmem: decode.Gmem, scales: Ref, scratch: _Scratch
) -> Sequence[jax.Array]:  # float32[64, columns] each
    """A warpgroup's part of an item's products."""
    expert, first_output = gmem.expert[item.tile], item.first_output + role.output * TILE

    def add(step: jax.Array, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        stage = decode.stage_of(spec, item.first_step + step)
        k_step = _Step(spec.step, stage, role.member, scratch, role, spec.config.outputs)
        k_step = k_step.with_block_scales(scales, expert, first_output, step)
        plgpu.barrier_wait(scratch.barriers.at[stage])
        totals = k_step.add(totals)
        plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])
        return totals

    init = [tiled.zeros((TILE, spec.columns)) for _ in range(spec.step.results)]
    return lax.fori_loop(0, spec.num_steps, add, init)


def _sum(
    spec: _Spec, output: jax.Array, totals: Sequence[jax.Array], scratch: _Scratch
) -> list[jax.Array]:
    """The products of a tile's first warpgroup and those of its others, for each half."""
    plgpu.barrier_wait(scratch.sums_barriers.at[output])
    results = dict(enumerate(totals))  # by half
    for other in range(1, spec.config.step.warpgroups):
        for i in range(spec.step.results):
            shared = plgpu.load(scratch.sums_smem.at[output, other - 1, i])
            half = other % 2 if spec.config.step.by_half else i
            results[half] = results[half] + shared if half in results else shared
    plgpu.barrier_arrive(scratch.sums_consumed_barriers.at[output])
    return list(results.values())


def _compute_warpgroup(
    spec: _Spec, warpgroup: jax.Array, gmem: decode.Gmem, scales: Ref, scratch: _Scratch
) -> None:
    """The warpgroup's part of all items of the CTA."""
    grid_dependency_wait()
    alone, items = spec.config.step.warpgroups == 1, num_items(spec, gmem.used)
    role = _Role.of(spec, warpgroup)
    consumed = scratch.sums_consumed_barriers.at[role.output]

    def share(i: jax.Array, totals: Sequence[jax.Array]) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(consumed))
        for result, total in enumerate(totals):
            scratch.sums_smem.at[role.output, role.member - 1, result][...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.sums_barriers.at[role.output])

    def first() -> None:
        if spec.sizes.halves == 1:
            pl.when(role.output == 0)(lambda: decode.write_zeros(spec, gmem))

        @pl.loop(0, items)
        def _item(i: jax.Array) -> None:
            item = item_at(spec, i)
            first_output = item.first_output + role.output * TILE
            last = spec.sizes.outer - TILE
            rows = decode.Rows.of(spec, gmem, item)
            added = decode.biases(spec, gmem, item, jnp.minimum(first_output, last))
            products = _accumulate(spec, item, role, gmem, scales, scratch)
            if not alone:
                products = _sum(spec, role.output, products, scratch)
            results = decode.finished(spec, products, added)
            pl.when(first_output <= last)(lambda: rows.write(results, first_output))

    def other() -> None:
        @pl.loop(0, items)
        def _item(i: jax.Array) -> None:
            share(i, _accumulate(spec, item_at(spec, i), role, gmem, scales, scratch))

        # the last sums have been read
        pl.when(items > 0)(lambda: plgpu.barrier_wait(consumed))

    pl.when(role.member == 0)(first)
    if not alone:
        pl.when(role.member > 0)(other)


def _kernel(spec: _Spec, gmem: decode.Gmem, views: tiled.Gmem, scratch: _Scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    decode.starts(spec)

    @pl.when(warpgroup == spec.config.warpgroups)
    def _memory() -> None:
        in_one_warp(lambda: _copy_all(spec, gmem, views, scratch))

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        _compute_warpgroup(spec, warpgroup, gmem, views.parts.scales, scratch)


def _scratch_types(spec: _Spec, parts: tiled.Parts) -> _Scratch:
    """``parts`` are the factors of all experts, see ``tiled.gmem_views``."""
    config, sizes = spec.config, spec.sizes
    stages, others = config.stages, max(1, config.step.warpgroups - 1)
    lanes = next(size for size in (32, 16, 8) if spec.columns % size == 0)
    values, parts_smem = tiled.weight_types(spec.step, parts, sizes.halves * config.outputs)
    copies = spec.copies * (1 + sum(part is not None for part in parts_smem))
    return _Scratch(
        x_smem=plgpu.SMEM(
            (stages, spec.columns, config.block_k),
            jnp.bfloat16,
            transforms=tiled.swizzled(spec.step.chunk, 2),
        ),
        values_smem=values,
        parts_smem=parts_smem,
        sums_smem=plgpu.SMEM(
            (config.outputs, others, spec.step.results, TILE, spec.columns),
            jnp.float32,
            transforms=tiled.swizzled(lanes, 4),
        ),
        barriers=plgpu.Barrier(num_arrivals=1 + copies, num_barriers=stages),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        sums_barriers=plgpu.Barrier(num_arrivals=others, num_barriers=config.outputs),
        sums_consumed_barriers=plgpu.Barrier(num_barriers=config.outputs),
    )


def launch_with(
    config: QuantisedConfig,
    sizes: GemmSizes,
    arrays: dict[str, jax.Array | None],  # the arguments of ``decode.Gmem`` but w and out, by name
    stack: Quantised,
) -> jax.Array:  # [N * width, O], or float32[k, T, O] of down
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    values, parts = tiled.gmem_views(sizes.tiled, stack, sizes.experts)
    used = [part for part in parts if part is not None]

    def kernel(gmem: decode.Gmem, scratch: Any, values: Any, *factors: Any) -> None:
        _kernel(spec, gmem, tiled.Gmem(None, values, parts.named(factors), None), scratch)

    return call_kernel(
        kernel,
        decode.Gmem,
        arrays,
        (values, *used),
        out_type=sizes.result,
        scratch_types=_scratch_types(spec, parts),
        ctas=spec.ctas,
        warpgroups=config.warpgroups,
        name="experts_gate_up_quantised" if sizes.halves == 2 else "experts_down_quantised",
    )
