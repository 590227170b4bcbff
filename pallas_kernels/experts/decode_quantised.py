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
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts import decode
from pallas_kernels.experts.decode import copy_items, item_at
from pallas_kernels.experts.items import Gmem, Item, Spec, launch_items
from pallas_kernels.experts.launch import GemmSizes, QuantisedConfig
from pallas_kernels.gemm.pipeline import Ring, divide_roles, in_one_warp
from pallas_kernels.lib.pdl import grid_dependency_wait
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.tiled import copies
from pallas_kernels.quantised_gemm.tiled import step as tiled
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.scratch import TiledScratch, scratch_types

type Ref = Any


@dataclass(frozen=True)
class _Spec(Spec):
    """Compile-time constants of the kernel."""

    config: QuantisedConfig

    @property
    def step(self) -> tiled.Spec:
        """The constants of one K step."""
        return tiled.Spec(self.sizes.tiled, self.config.step)


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


def _copy_all(spec: _Spec, gmem: Gmem, ring: Ring, scratch: TiledScratch) -> None:
    """Copy the K steps of all items."""

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array) -> None:
        stage = ring.stage(item.first_step + step)
        halves, outputs = spec.sizes.halves, spec.config.outputs
        tile = lax.div(item.first_output, jnp.int32(TILE))
        if outputs == 1:
            where: Any = (pl.ds(expert * halves, halves), tile)
            return copies.copy_weights(spec.step, gmem.tiled, scratch, where, step, stage)
        for half in range(halves):  # a missing tile becomes zeros
            where = (expert * halves + half, pl.ds(tile, outputs))
            place = pl.ds(half * outputs, outputs)
            copies.copy_weights(spec.step, gmem.tiled, scratch, where, step, stage, place)

    copy_items(spec, gmem, ring, scratch.x_smem, copy_weights)


def _accumulate(
    spec: _Spec,
    item: Item,
    role: _Role,
    gmem: Gmem,
    ring: Ring,
    scratch: TiledScratch,
) -> Sequence[jax.Array]:  # float32[64, columns] each
    """A warpgroup's part of an item's products."""
    expert, first_output = gmem.expert[item.tile], item.first_output + role.output * TILE

    def step_at(step: jax.Array, stage: jax.Array) -> tiled.Step:
        k_step = _Step(spec.step, stage, role.member, scratch, step, role, spec.config.outputs)
        return k_step.with_block_scales(gmem.tiled.parts.scales, expert, first_output, step)

    return tiled.accumulate(ring, spec.num_steps, item.first_step, spec.step, step_at)


def _compute_warpgroup(
    spec: _Spec, gmem: Gmem, ring: Ring, scratch: TiledScratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's part of all items of the CTA."""
    grid_dependency_wait()
    alone, items = spec.config.step.warpgroups == 1, spec.num_items(gmem.used)
    role = _Role.of(spec, warpgroup)
    consumed = scratch.shared_consumed_barriers.at[role.output]
    shared, smem = scratch.shared_barriers.at[role.output], scratch.shared_smem

    def accumulate(item: Item) -> Sequence[jax.Array]:
        return _accumulate(spec, item, role, gmem, ring, scratch)

    def share(i: jax.Array, totals: Sequence[jax.Array]) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(consumed))
        tiled.share(totals, lambda n: smem.at[role.output, role.member - 1, n], shared)

    def summed(totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        plgpu.barrier_wait(shared)
        totals = tiled.sum_of_warpgroups(
            spec.step, totals, lambda other, n: smem.at[role.output, other, n]
        )
        plgpu.barrier_arrive(consumed)
        return totals

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
            products = accumulate(item)
            results = decode.finished(spec, products if alone else summed(products), added)
            pl.when(first_output <= last)(lambda: rows.write(results, first_output))

    def other() -> None:
        pl.loop(0, items)(lambda i: share(i, accumulate(item_at(spec, i))))
        # the last sums have been read
        pl.when(items > 0)(lambda: plgpu.barrier_wait(consumed))

    pl.when(role.member == 0)(first)
    if not alone:
        pl.when(role.member > 0)(other)


def _kernel(spec: _Spec, gmem: Gmem, scratch: TiledScratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    decode.starts(spec)
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        spec.config.warpgroups,
        lambda: in_one_warp(lambda: _copy_all(spec, gmem, ring, scratch)),
        partial(_compute_warpgroup, spec, gmem, ring, scratch),
        warpgroup=warpgroup,
    )


def _scratch_types(spec: _Spec, views: tiled.Gmem) -> TiledScratch:
    config, sizes = spec.config, spec.sizes
    outputs, others = config.outputs, max(1, config.step.warpgroups - 1)
    return scratch_types(
        spec.step,
        views,
        tiles=sizes.halves * outputs,
        shared=(outputs, others, spec.step.results, TILE, sizes.columns),
        shared_barriers=plgpu.Barrier(num_arrivals=others, num_barriers=outputs),
        shared_consumed_barriers=plgpu.Barrier(num_barriers=outputs),
        warpgroups=config.warpgroups,
        copies=sizes.halves if outputs > 1 else 1,
    )


def launch_with(
    config: QuantisedConfig, sizes: GemmSizes, gmem: Gmem, stack: Quantised
) -> jax.Array:  # [N * width, O], or float32[k, T, O] of down
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    views = tiled.Gmem(None, *tiled.gmem_views(sizes.tiled, stack, sizes.experts))
    gmem, scratch = gmem._replace(tiled=views), _scratch_types(spec, views)
    return launch_items("_quantised", _kernel, spec, gmem, scratch, config.warpgroups)
