"""paged_prefill in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

There is one program for each multiprocessor, which takes tiles in turn, the longest first
(``mosaic_plan``). Two of them are a cluster where a kv head has query heads for both: each loads
half of every page, and TMA puts that into the shared memory of both. A program has three
warpgroups. Four warps of one copy queries and pages by TMA, two of them keys and two values, blocks
ahead of the other warpgroups and across the borders of tiles. Each of those attends for 64 queries
of one head, its products on the matrix units straight from shared memory: it multiplies a block of
keys, then the values of the block before by their weights, and weighs the new scores while the
latter runs. The two share the keys: two heads of one kv head over the same tokens, or, where a kv
head has an odd number of query heads, one head over 128 tokens. The method is that of
FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608), but for its turns at the matrix units.
Softmax runs in base 2, sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.page_streams import Pages, Stream, copied_by_warps
from pallas_kernels.paged_prefill.launch import ALIGNED, BLOCK, QUERIES, STEPS, WORKERS
from pallas_kernels.paged_prefill.mosaic_plan import (
    TURNS,
    Arrays,
    Ref,
    Shared,
    Sizes,
    Tile,
    over_tiles,
    room_of,
    share_of,
    shared_types,
    step_of,
    tile_table,
)

WORKER_REGISTERS, LOADER_REGISTERS = 232, 40  # of a thread: 504 of the 512 there are for three
OVERHANGS = (32, 16, 8, 4, 2, 1)  # queries of a copy where a tile has fewer than its own
FOLD = 8  # columns of which each thread has two, and two in another row

# top [QUERIES], total [QUERIES, FOLD], weights [QUERIES, BLOCK]
type _Weighed = tuple[jax.Array, jax.Array, jax.Array]
type _Sums = tuple[jax.Array, _Weighed]  # float32[QUERIES, H], short of the values of the weights


def _load(sizes: Sizes, arrays: Arrays, shared: Shared) -> None:
    """Copy queries and blocks as room becomes free, each warp its share."""
    keys = Pages(arrays.k_pages, shared.k, shared.k_full, shared.k_free)
    values = Pages(arrays.v_pages, shared.v, shared.v_full, shared.v_free)
    copied_by_warps(keys, values, sizes.pages, partial(_copy_all, sizes, arrays, shared))


def _copy_all(sizes: Sizes, arrays: Arrays, shared: Shared, stream: Stream) -> None:
    """One warp's copies for all tiles of the program; queries are the first warp's as well, whose
    keys wait for them, and values do not.
    """

    def copy(tile: Tile) -> None:
        if stream.is_first:
            pl.when(tile.first < tile.last)(partial(_copy_queries, sizes, arrays, shared, tile))
        _copy_blocks(sizes, arrays, stream, tile)

    attended, blocks = over_tiles(sizes, arrays, copy)

    # A barrier left early is an error.
    @pl.loop(jnp.maximum(blocks - STEPS, 0), blocks)
    def _see_through(block: jax.Array) -> None:
        plgpu.barrier_wait(stream.pages.free.at[lax.rem(block, jnp.int32(STEPS))])

    if stream.is_first:

        @pl.loop(jnp.maximum(attended - TURNS, 0), attended)
        def _see_queries_through(turn: jax.Array) -> None:
            for worker in range(WORKERS):
                plgpu.barrier_wait(shared.q_free.at[room_of(turn, worker)[1]])


def _copy_queries(sizes: Sizes, arrays: Arrays, shared: Shared, tile: Tile) -> None:
    """Of both workers, each once it is done with those whose room they take."""
    for worker in range(WORKERS):
        head, offset = share_of(sizes, worker)
        source = arrays.q.at[pl.ds(tile.token + offset, QUERIES), tile.head + head]
        place, barrier = room_of(tile.turn, worker)
        pl.when(tile.turn >= TURNS)(partial(plgpu.barrier_wait, shared.q_free.at[barrier]))
        plgpu.copy_gmem_to_smem(source, shared.q.at[place, worker], shared.q_full.at[barrier])


def _copy_blocks(sizes: Sizes, arrays: Arrays, stream: Stream, tile: Tile) -> None:
    """A warp's share of a tile's blocks."""
    last_page = lax.div(jnp.maximum(tile.end - 1, 0), jnp.int32(sizes.page_size))
    kv_head = lax.div(tile.head, jnp.int32(sizes.group))

    def pages_of(block: jax.Array | int) -> tuple[jax.Array, ...]:
        # Entries past the row's pages may be junk: a page that is there stands in for them.
        places = (jnp.minimum(block * sizes.pages + i, last_page) for i in stream.own)
        return tuple(arrays.page_table[tile.row, place] for place in places)

    def copy(block: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step, occupied = step_of(tile, block), tile.before + block - tile.first >= STEPS
        following = pages_of(block + 1)  # in flight while this block waits for room
        pl.when(occupied)(lambda: plgpu.barrier_wait(stream.pages.free.at[step]))
        for i, page in zip(stream.own, pages, strict=True):
            to = stream.pages.room.at[step, pl.ds(i * sizes.page_size, sizes.page_size)]
            source = stream.pages.pool.at[page, pl.ds(0, sizes.page_size), kv_head]
            full = stream.pages.full.at[step]
            plgpu.copy_gmem_to_smem(source, to, full, collective_axes=sizes.together)
        return following

    lax.fori_loop(tile.first, tile.last, copy, pages_of(tile.first))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _zeros(shape: tuple[int, ...], layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def _clear_unwritten(sizes: Sizes, v: Ref, left: jax.Array) -> None:  # [BLOCK, H]
    """Zero all but the first ``left`` values: a weight of 0 does not silence NaN.

    Both workers do so and neither waits for the other, as both write the same.
    """

    @pl.when(left < BLOCK)
    def _clear() -> None:
        for start in range(0, BLOCK, QUERIES):
            part = v.at[pl.ds(start, QUERIES)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            written = _iota((QUERIES, sizes.head_dim), 0) + start < left
            part[...] = jnp.where(written, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _folded(
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,  # [QUERIES, BLOCK]
) -> jax.Array:  # [QUERIES, FOLD]
    """Columns combined within each thread, four of its values side by side: in a row of 32 each
    operation would wait for the last (7 % of the kernel's time at 16,384 keys on an H200).
    """
    return reduce(combine, (x[:, start : start + FOLD] for start in range(0, BLOCK, FOLD)))


def _accumulate(
    acc: jax.Array,  # float32[QUERIES, H]
    weights: jax.Array,  # [QUERIES, BLOCK]
    v: Ref,  # [BLOCK, H]
    init: tuple[jax.Array, ...] = (),
    meanwhile: Callable[[], tuple[jax.Array, ...]] = tuple,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # float32[QUERIES, H]
    """Add weights * values in the registers of the sum, and what ``meanwhile`` comes to.

    ``init`` has the shapes of that. JAX's interpreter cannot multiply like this.
    """

    def multiply(refs: Any) -> None:
        plgpu.wgmma(refs[0], weights, v)
        for ref, result in zip(refs[1], meanwhile(), strict=True):
            ref[...] = result

    init_acc: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(multiply)((init_acc, init))


@dataclass(frozen=True)
class _Worker:
    """One worker's part of a tile."""

    sizes: Sizes
    tile: Tile
    index: jax.Array
    position: jax.Array  # of its first query
    shared: Shared

    def await_keys(self, block: jax.Array | int) -> None:
        """Wait for a block of keys, if the tile has it."""

        @pl.when(block < self.tile.last)
        def _wait() -> None:
            plgpu.barrier_wait(self.shared.k_full.at[step_of(self.tile, block)])

    def score(self, scores: Ref, step: jax.Array) -> None:
        """Begin to multiply queries and keys."""
        place, _ = room_of(self.tile.turn, self.index)
        keys = self.shared.k.at[step].transpose((1, 0))
        plgpu.wgmma(scores, self.shared.q.at[place, self.index], keys)

    def weigh(
        self,
        scores: jax.Array,  # float32[QUERIES, BLOCK]
        block: jax.Array | int,
        top: jax.Array,  # float32[QUERIES]
        total: jax.Array,  # float32[QUERIES, FOLD]
        masked: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Top score and total weights so far, what earlier sums shrink by, and the weights."""
        sizes = self.sizes
        if masked:
            shape = (QUERIES, BLOCK)
            newest = _iota(shape, 0) + self.position
            key = _iota(shape, 1) + block * BLOCK
            visible = key <= newest
            if sizes.window is not None:
                visible &= key > newest - sizes.window
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, _folded(jnp.maximum, scores).max(axis=1) * sizes.scale)
        base = new_top
        if masked and sizes.window is not None:
            # A query whose window begins later has seen nothing yet: -inf - -inf would be NaN.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp2(top - base)
        weights = jnp.exp2(scores * sizes.scale - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
        total += _folded(jnp.add, weights)
        return new_top, total, shrink, weights

    def first_block(self, top: jax.Array, total: jax.Array) -> _Weighed:
        """Weights of the first block of keys."""
        block, step = self.tile.first, step_of(self.tile, self.tile.first)
        self.await_keys(block)

        def multiply(scores: Ref) -> jax.Array:
            self.score(scores, step)
            return scores[...]

        shape = (QUERIES, BLOCK)
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(self.shared.k_free.at[step])
        new_top, total, _, weights = self.weigh(scores, block, top, total, masked=True)
        self.await_keys(block + 1)
        return new_top, total, weights.astype(self.shared.v.dtype)

    def next_block(self, masked: bool, block: jax.Array, sums: _Sums) -> _Sums:
        """Weigh a block of keys while the values of the one before it are summed."""
        shared, (acc, (top, total, narrow)) = self.shared, sums
        step, before = (step_of(self.tile, b) for b in (block, block - 1))

        def multiply(scores: Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            self.score(scores, step)
            plgpu.barrier_wait(shared.v_full.at[before])

            weights = _zeros((QUERIES, BLOCK))

            def weigh() -> tuple[jax.Array, ...]:
                # Scores alone: the product begun after theirs is still under way.
                values = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                plgpu.barrier_arrive(shared.k_free.at[step])
                results = lax.optimization_barrier(self.weigh(values, block, top, total, masked))
                # The compiler moves the wait for the product to before the softmax, but for this.
                self.await_keys(block + 1)
                return results

            init = (top, total, top, weights)
            return _accumulate(acc, narrow, shared.v.at[before], init, weigh)

        scores = plgpu.WGMMAAccumulatorRef((QUERIES, BLOCK), jnp.float32)
        acc, (top, total, shrink, weights) = pl.run_scoped(multiply, scores)
        plgpu.barrier_arrive(shared.v_free.at[before])
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        # Registers that a product reads must not change before it ends.
        weights = lax.optimization_barrier(weights)
        return acc, (top, total, weights.astype(shared.v.dtype))

    def last_values(self, sums: _Sums) -> jax.Array:  # float32[QUERIES, H]
        """The sums with the last block in them, over the total weight."""
        acc, (_, total, weights) = sums
        block, shared = self.tile.last - 1, self.shared
        step = step_of(self.tile, block)
        plgpu.barrier_wait(shared.v_full.at[step])
        _clear_unwritten(self.sizes, shared.v.at[step], self.tile.end - block * BLOCK)
        acc, _ = _accumulate(acc, weights, shared.v.at[step])
        plgpu.barrier_arrive(shared.v_free.at[step])
        return acc * lax.broadcast_in_dim(1.0 / total.sum(axis=1), acc.shape, [0])

    def attend(self) -> jax.Array:  # float32[QUERIES, H]
        """Attention over all the tile's keys, of which there is one at least."""
        tile, shape = self.tile, (QUERIES, self.sizes.head_dim)
        nothing = _zeros((QUERIES,), plgpu.Layout.WGMMA.reduce(1))
        sums = _zeros(shape), self.first_block(nothing - jnp.inf, _zeros((QUERIES, FOLD)))
        with_masks, without = (partial(self.next_block, masked) for masked in (True, False))
        second = tile.first + 1
        if self.sizes.window is not None:
            sums = lax.fori_loop(second, tile.common, with_masks, sums)
        sums = lax.fori_loop(jnp.maximum(tile.common, second), tile.diagonal, without, sums)
        sums = lax.fori_loop(jnp.maximum(tile.diagonal, second), tile.last, with_masks, sums)
        return self.last_values(sums)


def _work(sizes: Sizes, arrays: Arrays, shared: Shared, index: jax.Array) -> None:
    """Attention of one worker's queries of all tiles, from global memory to global memory."""
    _, offset = share_of(sizes, index)

    def attend(tile: Tile) -> None:
        @pl.when(tile.first < tile.last)
        def _attend() -> None:
            _, barrier = room_of(tile.turn, index)
            plgpu.barrier_wait(shared.q_full.at[barrier])
            attended = _Worker(sizes, tile, index, tile.position + offset, shared).attend()
            plgpu.barrier_arrive(shared.q_free.at[barrier])
            _store(sizes, arrays, shared, tile, index, attended)

        @pl.when(tile.first == tile.last)
        def _padding() -> None:
            _store(sizes, arrays, shared, tile, index, _zeros((QUERIES, sizes.head_dim)))

    over_tiles(sizes, arrays, attend)
    plgpu.wait_smem_to_gmem(0)


def _store(
    sizes: Sizes,
    arrays: Arrays,
    shared: Shared,
    tile: Tile,
    worker: jax.Array,
    results: jax.Array,  # float32[QUERIES, H]
) -> None:
    """Begin to write a worker's results: whole, or those of the tile's row alone."""
    head, offset = share_of(sizes, worker)
    plain, swizzled = (view.at[worker] for view in shared.results)
    token, head = tile.token + offset, tile.head + head
    lead = jnp.maximum(tile.lead - offset, 0)
    count = jnp.clip(tile.count - offset, lead, QUERIES) - lead
    results = results.astype(arrays.out.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the tile before have left

    @pl.when(count == QUERIES)
    def _store_tile() -> None:
        swizzled[...] = results
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(swizzled, arrays.out.at[pl.ds(token, QUERIES), head])

    @pl.when(count < QUERIES)
    def _store_queries() -> None:
        plain[...] = results
        plgpu.commit_smem()
        for size in OVERHANGS:

            @pl.when(count & size != 0)
            def _some(size: int = size) -> None:
                first = lead + (count & -2 * size)  # larger ones come before
                to = arrays.out.at[pl.ds(token + first, size), head]
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(first, size)], to)


def _kernel(sizes: Sizes, arrays: Arrays, shared: Shared) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < WORKERS)
    def _attend() -> None:
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        _work(sizes, arrays, shared, warpgroup)

    @pl.when(warpgroup == WORKERS)
    def _fetch() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        _load(sizes, arrays, shared)


@partial(jax.jit, static_argnames=("scale", "window"))  # one trace, one kernel for all layers
def paged_prefill(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    num_tokens = q.shape[0]
    q = jnp.pad(q, ((0, -num_tokens % ALIGNED), (0, 0), (0, 0)))
    (t, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    group, scale = n // num_kv_heads, scale * math.log2(math.e)
    sizes = Sizes(h, page_size, n, group, scale, window)
    tiles, num_tiles = tile_table(query_start_loc, seq_lens, t, sizes.tile_tokens)
    sizes = replace(sizes, num_tiles=tiles.shape[0])

    def body(*refs: Ref, **scratch: Ref) -> None:
        _kernel(sizes, Arrays(*refs), Shared(**scratch))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=shared_types(sizes, q.dtype),
        grid=(sizes.clusters,),
        grid_names=("cluster",),
        cluster=(sizes.cluster,),
        cluster_names=("rank",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_prefill",
    )(q, k_pages, v_pages, page_table, tiles, num_tiles)
    return out[:num_tokens]
