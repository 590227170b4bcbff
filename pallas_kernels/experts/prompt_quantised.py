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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.items import Gmem, Item, Spec, activated, launch_items, load_bias
from pallas_kernels.experts.launch import GemmSizes, QuantisedPromptConfig
from pallas_kernels.experts.prompt import copy_items, item_at
from pallas_kernels.gemm.epilogues import write_columns
from pallas_kernels.gemm.pipeline import Ring, divide_roles, in_one_warp
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.tiled import copies
from pallas_kernels.quantised_gemm.tiled import step as tiled
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.large.launch import PAIR
from pallas_kernels.quantised_gemm.tiled.scratch import TiledScratch, Ups, scratch_types

type Ref = Any


@dataclass(frozen=True)
class _Spec(Spec):
    """Compile-time constants of the kernel. An item's ``first_output`` is that of its pair."""

    config: QuantisedPromptConfig

    @property
    def step(self) -> tiled.Spec:
        """The constants of one K step."""
        sizes, step = self.sizes.tiled, self.config.step
        return tiled.Spec(sizes, step, sums_given=sizes.offsets and not step.scales)


def _copy_all(spec: _Spec, gmem: Gmem, ring: Ring, scratch: TiledScratch) -> None:
    """Copy the K steps of all items."""
    width = spec.sizes.width

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        pair = lax.div(item.first_output, jnp.int32(spec.config.block_n))
        if spec.sizes.halves == 2:
            where: Any = (pl.ds(expert * PAIR, PAIR), pair)
        else:
            where = (expert, pl.ds(pair * PAIR, PAIR))  # a missing tile becomes zeros
        copies.copy_weights(spec.step, gmem.tiled, scratch, where, step, stage)
        rows = pl.ds(item.tile * width, width)
        copies.copy_sums(spec.step, gmem.tiled.sums, scratch, rows, step, stage)

    copy_items(spec, gmem, ring, scratch.x_smem, copy_weights)


def _first_output(spec: _Spec, item: Item, warpgroup: jax.Array) -> jax.Array:
    """The first output of a warpgroup's tile, which may be missing in the last item."""
    return item.first_output + (0 if spec.sizes.halves == 2 else warpgroup * TILE)


def _accumulate(
    spec: _Spec,
    item: Item,
    warpgroup: jax.Array,
    gmem: Gmem,
    ring: Ring,
    scratch: TiledScratch,
) -> jax.Array:  # float32[64, width]
    """The products of the warpgroup's tile of outputs."""
    expert, first_output = gmem.expert[item.tile], _first_output(spec, item, warpgroup)

    def step_at(step: jax.Array, stage: jax.Array) -> tiled.Step:
        k_step = tiled.Step(spec.step, stage, warpgroup, scratch, step)
        return k_step.with_block_scales(gmem.tiled.parts.scales, expert, first_output, step)

    (total,) = tiled.accumulate(ring, spec.num_steps, item.first_step, spec.step, step_at)
    return total


def _with_bias(
    gmem: Gmem, item: Item, half: jax.Array | int, first_output: jax.Array, total: jax.Array
) -> jax.Array:  # float32[64, width]
    if gmem.bias is None:
        return total
    bias = load_bias(gmem, item, half, pl.ds(first_output, TILE), 1)
    return total + lax.broadcast_in_dim(bias, total.shape, [0])


def _compute_warpgroup(
    spec: _Spec, gmem: Gmem, ring: Ring, scratch: TiledScratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's tile of outputs of all items of the CTA."""
    activation, ups, width = spec.sizes.activation, Ups(scratch), spec.sizes.width

    def write(item: Item, first_output: jax.Array, result: jax.Array) -> None:
        """Write 64 outputs of all rows of the tile, in use or not."""
        rows = pl.ds(item.tile * width, width)
        write_columns(gmem.out, rows, pl.ds(first_output, TILE), result)

    def write_activated(item: Item, gates: jax.Array) -> None:
        taken = ups.take()
        assert activation is not None
        write(item, item.first_output, activated(activation, gates, taken))

    def write_plain(item: Item, first_output: jax.Array, total: jax.Array) -> None:
        write(item, first_output, _with_bias(gmem, item, 0, first_output, total))

    items = spec.num_items(gmem.used)

    @pl.loop(0, items)
    def _next(i: jax.Array) -> None:
        item = item_at(spec, gmem, i)
        total = _accumulate(spec, item, warpgroup, gmem, ring, scratch)
        if spec.sizes.halves == 2:
            total = _with_bias(gmem, item, warpgroup, item.first_output, total)
            pl.when(warpgroup == 1)(partial(ups.put, i, total))
            pl.when(warpgroup == 0)(partial(write_activated, item, total))
            return
        first_output = _first_output(spec, item, warpgroup)
        pl.when(first_output < spec.sizes.outer)(partial(write_plain, item, first_output, total))

    if spec.sizes.halves == 2:
        pl.when((warpgroup == 1) & (items > 0))(ups.wait_taken)


def _kernel(spec: _Spec, gmem: Gmem, scratch: TiledScratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    grid_dependency_wait()
    launch_dependents()
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        PAIR,
        lambda: in_one_warp(lambda: _copy_all(spec, gmem, ring, scratch)),
        partial(_compute_warpgroup, spec, gmem, ring, scratch),
        moves_registers=True,
        warpgroup=warpgroup,
    )


def _scratch_types(spec: _Spec, views: tiled.Gmem) -> TiledScratch:
    return scratch_types(
        spec.step,
        views,
        tiles=PAIR,
        shared=(TILE, spec.sizes.width if spec.sizes.halves == 2 else 32),
        shared_barriers=plgpu.Barrier(),
        shared_consumed_barriers=plgpu.Barrier(),
        warpgroups=PAIR,
    )


def launch_with(
    config: QuantisedPromptConfig, sizes: GemmSizes, gmem: Gmem, stack: Quantised
) -> jax.Array:  # [N * width, O]
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    views = tiled.Gmem(None, *tiled.gmem_views(sizes.tiled, stack, sizes.experts))
    if spec.step.sums_given:
        views = views._replace(sums=tiled.input_sums(gmem.x, sizes.tiled.group))
    gmem, scratch = gmem._replace(tiled=views), _scratch_types(spec, views)
    return launch_items("_prompt_quantised", _kernel, spec, gmem, scratch, PAIR)
