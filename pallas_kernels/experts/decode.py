"""The GEMMs of experts for few tokens, in Pallas Mosaic GPU, for NVIDIA Hopper.

With few tokens a step reads the weights of every expert that a token chose, and that takes all the
time. A persistent kernel: a CTA computes item after item, an item being 64 or 128 outputs of one
tile of tokens. The memory warpgroup copies the weights of further items while the compute
warpgroups still write their results, so copies never pause. As in ``skinny_gemm`` the GEMM is
transposed: M of a wgmma are outputs, N are tokens.

With at most ``launch.ALL_TOKENS`` tokens ``gate_up`` multiplies all of them by every expert and
keeps the products of the tokens that chose it, which saves a kernel that sorts the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.items import Gmem, Item, Spec, activated, launch_items
from pallas_kernels.experts.launch import DecodeConfig, GemmSizes
from pallas_kernels.experts.scattered import load_at, store_at
from pallas_kernels.gemm.pipeline import Ring, divide_roles, in_one_warp, matmul
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents

MMA_OUTPUTS = 64  # M of a wgmma, and the inputs of a swizzled tile

type Ref = Any
type CopyWeights = Callable[[Item, jax.Array, jax.Array], None]  # of an item, expert and K step


def item_at(spec: Spec, i: jax.Array | int) -> Item:
    """The CTA's i-th item. CTAs compute adjacent outputs of an expert at the same time."""
    index = i * spec.ctas + lax.axis_index("cta")
    tile = lax.div(index, jnp.int32(spec.blocks))
    block = index - tile * spec.blocks
    return Item(tile, block * spec.config.block_n, jnp.int32(i * spec.num_steps))


def copy_items(spec: Spec, gmem: Gmem, ring: Ring, x_smem: Ref, copy_weights: CopyWeights) -> None:
    """Copy the K steps of all items as stages are consumed.

    The kernel before ``down`` is ``gate_up``, which lets it start only after the tiles are known.
    So ``down`` reads tiles and copies weights before ``gate_up`` has ended.
    """
    config, sizes = spec.config, spec.sizes

    def copy_tokens(item: Item, step: jax.Array) -> None:
        stage = ring.stage(item.first_step + step)
        first = 0 if sizes.all_tokens else item.tile * sizes.width
        inputs = pl.ds(step * config.block_k, config.block_k)
        tokens = gmem.x.at[pl.ds(first, sizes.columns), inputs]  # missing rows become zeros
        plgpu.copy_gmem_to_smem(tokens, x_smem.at[stage], ring.barriers.at[stage])

    def copy(item: Item, expert: jax.Array, step: jax.Array) -> None:
        number = item.first_step + step
        consumed = ring.consumed_barriers.at[ring.stage(number)]
        pl.when(number >= config.stages)(lambda: plgpu.barrier_wait(consumed))
        copy_weights(item, expert, step)
        copy_tokens(item, step)

    items = spec.num_items(gmem.used)

    @pl.when(items > 0)
    def _first() -> None:
        item, prologue = item_at(spec, 0), min(config.stages, spec.num_steps)
        expert = gmem.expert[item.tile]
        pl.loop(0, prologue)(lambda step: copy_weights(item, expert, step))
        grid_dependency_wait()
        pl.loop(0, prologue)(lambda step: copy_tokens(item, step))
        pl.loop(prologue, spec.num_steps)(lambda step: copy(item, expert, step))

    @pl.loop(1, items)
    def _next(i: jax.Array) -> None:
        item = item_at(spec, i)
        expert = gmem.expert[item.tile]
        pl.loop(0, spec.num_steps)(lambda step: copy(item, expert, step))

    ring.drain(items * spec.num_steps)


def _copy_all(spec: Spec, gmem: Gmem, ring: Ring, scratch: Scratch) -> None:
    """Copy the K steps of all items."""
    config = spec.config

    def copy_weights(item: Item, expert: jax.Array, step: jax.Array) -> None:
        stage = ring.stage(item.first_step + step)
        inputs = pl.ds(step * config.block_k, config.block_k)
        outputs = pl.ds(item.first_output, config.block_n)
        for half in range(spec.sizes.halves):
            w_smem, barrier = scratch.w_smem.at[stage, half], ring.barriers.at[stage]
            plgpu.copy_gmem_to_smem(gmem.w.at[expert, half, outputs, inputs], w_smem, barrier)

    copy_items(spec, gmem, ring, scratch.x_smem, copy_weights)


def _matmul(
    spec: Spec, item: Item, warpgroup: jax.Array, ring: Ring, scratch: Scratch
) -> tuple[jax.Array, ...]:  # float32[64, columns], one for each half
    """The warpgroup's products of an item."""
    outputs, halves = pl.ds(warpgroup * MMA_OUTPUTS, MMA_OUTPUTS), spec.sizes.halves

    def issue(_: jax.Array, stage: jax.Array, accs: Sequence[Ref]) -> int:
        x = scratch.x_smem.at[stage].transpose((1, 0))
        for half, acc in enumerate(accs):
            plgpu.wgmma(acc, scratch.w_smem.at[stage, half, outputs], x)
        return halves

    def release(step: jax.Array) -> None:
        pl.when(step > 0)(lambda: ring.release(item.first_step + (step - 1)))

    shape, steps, first = (MMA_OUTPUTS, spec.sizes.columns), spec.num_steps, item.first_step
    products = matmul(ring, steps, shape, issue, release, count=halves, first_step=first)
    ring.release(item.first_step + (spec.num_steps - 1))
    return products


@dataclass(frozen=True)
class Rows:
    """Where the columns of an item's results are written, read before its matmuls so that it takes
    no time after them.

    A thread stores the values that it holds. To bring those of a row together first took 19 of the
    64 us of ``down`` with 64 tokens and the int4 experts of Qwen3-30B-A3B (H100).
    """

    gmem: Gmem
    offsets: jax.Array  # int32[columns] of a row's first output in ``out``; negative: no row
    weights: jax.Array | None  # float32[columns], of down

    @classmethod
    def of(cls, spec: Spec, gmem: Gmem, item: Item) -> Rows:
        """Read those of an item."""
        sizes, layout = spec.sizes, plgpu.Layout.WGMMA.reduce(0)
        index = plgpu.broadcasted_iota(jnp.int32, (sizes.columns,), 0, layout=layout)
        first, count = item.tile * sizes.width, gmem.rows[item.tile]
        weights = None
        if sizes.halves == 1:
            held = gmem.pairs.at[pl.ds(first, sizes.width)]
            held = plgpu.load(held, layout=layout, optimized=False)
            pairs = jnp.where(index < count, held, 0)
            token = lax.div(pairs, jnp.int32(sizes.chosen))
            places = (pairs - token * sizes.chosen) * sizes.tokens + token
            places, weights = jnp.where(index < count, places, -1), load_at(gmem.weights, pairs)
        elif sizes.all_tokens:
            places = jnp.full_like(index, -1)
            for i in range(sizes.width):
                token = lax.div(gmem.pairs[first + i], jnp.int32(sizes.chosen))
                places = jnp.where((index == token) & (i < count), first + i, places)
        else:
            places = jnp.where(index < count, first + index, -1)
        return cls(gmem, places * sizes.outer, weights)

    def write(self, results: jax.Array, first_output: jax.Array) -> None:  # float32[64, columns]
        """Write the results of 64 outputs: hidden values, or weighted outputs."""
        output = plgpu.broadcasted_iota(jnp.int32, results.shape, 0, layout=plgpu.Layout.WGMMA)
        offsets = lax.broadcast_in_dim(self.offsets, results.shape, [1])
        offsets = jnp.where(offsets < 0, -1, offsets + output + first_output)
        if self.weights is not None:
            results *= lax.broadcast_in_dim(self.weights, results.shape, [1])
        store_at(self.gmem.out, offsets, results.astype(self.gmem.out.dtype))


def biases(spec: Spec, gmem: Gmem, item: Item, first_output: jax.Array) -> list[jax.Array]:
    """The biases of 64 outputs, float32[64] for each half; none without biases."""
    if gmem.bias is None:
        return []
    expert, outputs = gmem.expert[item.tile], pl.ds(first_output, MMA_OUTPUTS)
    layout = plgpu.Layout.WGMMA.reduce(1)
    found = [gmem.bias.at[expert, half, outputs] for half in range(spec.sizes.halves)]
    return [plgpu.load(one, layout=layout, optimized=False).astype(jnp.float32) for one in found]


def finished(
    spec: Spec, products: Sequence[jax.Array], added: Sequence[jax.Array]
) -> jax.Array:  # float32[64, columns]
    """Products of the halves with their biases, activated if there are gates and ups."""
    results = list(products)
    for half, bias in enumerate(added):
        results[half] += lax.broadcast_in_dim(bias, results[half].shape, [0])
    activation = spec.sizes.activation
    return results[0] if activation is None else activated(activation, results[0], results[1])


def write_zeros(spec: Spec, gmem: Gmem) -> None:
    """Write zeros for the pairs of no expert, which are in no tile; each CTA its share."""
    sizes, layout = spec.sizes, plgpu.Layout.WGMMA.reduce(1)

    @pl.loop(lax.axis_index("cta"), sizes.pairs, step=spec.ctas)
    def _pair(pair: jax.Array) -> None:
        @pl.when(gmem.place[pair] >= sizes.tiles * sizes.width)
        def _none() -> None:
            token = lax.div(pair, jnp.int32(sizes.chosen))
            row = gmem.out.at[pair - token * sizes.chosen, token]

            @pl.loop(0, sizes.outer // MMA_OUTPUTS)
            def _block(block: jax.Array) -> None:
                zeros = plgpu.layout_cast(jnp.zeros((MMA_OUTPUTS,), jnp.float32), layout)
                row.at[pl.ds(block * MMA_OUTPUTS, MMA_OUTPUTS)][...] = zeros


def _compute_warpgroup(
    spec: Spec, gmem: Gmem, ring: Ring, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """The warpgroup's 64 outputs of all items of the CTA."""
    grid_dependency_wait()
    if spec.sizes.halves == 1:
        pl.when(warpgroup == 0)(lambda: write_zeros(spec, gmem))

    @pl.loop(0, spec.num_items(gmem.used))
    def _item(i: jax.Array) -> None:
        item = item_at(spec, i)
        first_output = item.first_output + warpgroup * MMA_OUTPUTS
        rows = Rows.of(spec, gmem, item)
        added = biases(spec, gmem, item, first_output)
        products = _matmul(spec, item, warpgroup, ring, scratch)
        rows.write(finished(spec, products, added), first_output)


def starts(spec: Spec) -> None:
    """Wait for earlier kernels as far as the kernel must at once, and let the next one start."""
    if spec.sizes.halves == 2:
        grid_dependency_wait()  # so the tiles are known when ``down`` starts
    launch_dependents()


def _kernel(spec: Spec, gmem: Gmem, scratch: Scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    starts(spec)
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    divide_roles(
        spec.config.warpgroups,
        lambda: in_one_warp(lambda: _copy_all(spec, gmem, ring, scratch)),
        partial(_compute_warpgroup, spec, gmem, ring, scratch),
        warpgroup=warpgroup,
    )


def _scratch_types(spec: Spec) -> Scratch:
    config, sizes = spec.config, spec.sizes
    weights = (config.stages, sizes.halves, config.block_n, config.block_k)
    tokens = (config.stages, sizes.columns, config.block_k)
    return Scratch(
        w_smem=smem(weights, sizes.dtype, MMA_OUTPUTS),
        x_smem=smem(tokens, sizes.dtype, MMA_OUTPUTS),
        **stage_barriers(config.stages, sizes.halves + 1, config.warpgroups),
    )


def launch_with(config: DecodeConfig, sizes: GemmSizes, gmem: Gmem) -> jax.Array:
    """One of the two GEMMs with a given configuration.

    Raises ValueError when the configuration does not fit.
    """
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = Spec(sizes, config)
    return launch_items("", _kernel, spec, gmem, _scratch_types(spec), config.warpgroups)
