"""paged_prefill in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A program has three warpgroups. Four warps of one copy pages into shared memory by TMA, two of them
keys and two values, blocks ahead of the other warpgroups. Each of those attends for 64 queries of
one head, its products on the matrix units straight from shared memory: it multiplies a block of
keys, then the values of the block before by their weights, and weighs the new scores while the
latter runs. The two take turns at the matrix units. They share the keys: two heads of one kv head
over the same tokens, or, where a kv head has an odd number of query heads, one head over 128
tokens. The method is that of FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). Softmax runs
in base 2, sums in float32.
Must not know: which calls come here (``launch``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.launch import BLOCK, QUERIES, STEPS, WORKERS

ROW, FIRST, COUNT, POSITION = range(4)  # columns of the table of tiles
WORKER_REGISTERS, LOADER_REGISTERS = 232, 40  # of a thread: 504 of the 512 there are for three
READERS = 2  # warps that copy keys, and as many that copy values

type Ref = Any


@dataclass(frozen=True)
class _Sizes:
    """What is known when the kernel is compiled."""

    head_dim: int
    page_size: int
    group: int  # query heads of a kv head
    scale: float  # of scores, log2(e) included; positive
    window: int | None

    @property
    def pages(self) -> int:  # of a block
        return BLOCK // self.page_size

    @property
    def tile_heads(self) -> int:
        return WORKERS if self.group % WORKERS == 0 else 1

    @property
    def tile_tokens(self) -> int:
        return QUERIES * WORKERS // self.tile_heads


class _Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    q: Ref  # [WORKERS, QUERIES, H]
    plain: Ref  # [WORKERS, QUERIES, H]: queries, then results, not swizzled; where q is
    k: Ref  # [STEPS, BLOCK, H]
    v: Ref  # [STEPS, BLOCK, H]
    q_full: Ref  # [WORKERS]
    k_full: Ref  # [STEPS]: one arrival a page
    v_full: Ref  # [STEPS]: one arrival a page
    k_free: Ref  # [STEPS]: one arrival a worker
    v_free: Ref  # [STEPS]: one arrival a worker
    turn: Ref  # [WORKERS]: the matrix units are this worker's


type _Weighed = tuple[jax.Array, jax.Array, jax.Array]  # top, total [QUERIES]; [QUERIES, BLOCK]
type _Sums = tuple[jax.Array, _Weighed]  # float32[QUERIES, H], short of the values of the weights


class _Tile(NamedTuple):
    """What a program attends to; int32 scalars. Blocks count from the start of the context."""

    row: jax.Array
    token: jax.Array  # the first query, in q
    count: jax.Array  # queries that belong to the row; the rest of the tile overhangs
    position: jax.Array  # of the first query in its context
    end: jax.Array  # keys from here on are not seen, perhaps not written
    first: jax.Array | int  # block
    common: jax.Array | int  # from this block on every query sees everything ...
    diagonal: jax.Array  # ... before this one
    last: jax.Array  # one past the last block


def _tile_table(
    query_start_loc: jax.Array,  # int32[R + 1]
    seq_lens: jax.Array,  # int32[R]
    num_tokens: int,
    tile_tokens: int,
) -> jax.Array:  # int32[tiles, 4]
    """Tiles of all rows, those that end a row first: late long ones would keep the chip waiting.

    Row r owns the tiles from ``query_start_loc[r] // tile_tokens + r`` on, at least as many as it
    fills; the padding behind the last row is one more row, of no context. Spare tiles count 0.
    """
    num_rows = seq_lens.shape[0] + 1
    starts = jnp.append(query_start_loc, jnp.int32(num_tokens))
    lens = jnp.append(seq_lens, jnp.int32(0))
    owned_from = starts[:-1] // tile_tokens + jnp.arange(num_rows, dtype=jnp.int32)
    tile = jnp.arange(num_tokens // tile_tokens + num_rows, dtype=jnp.int32)[::-1]
    row = jnp.sum(owned_from <= tile[:, None], axis=1, dtype=jnp.int32) - 1
    token = starts[row] + (tile - owned_from[row]) * tile_tokens
    left = starts[row + 1] - token
    count = jnp.clip(left, 0, tile_tokens)
    return jnp.stack([jnp.minimum(row, num_rows - 2), token, count, lens[row] - left], axis=1)


def _read_tile(sizes: _Sizes, tiles: Ref, index: jax.Array) -> _Tile:
    row, token, count, position = (tiles[index, i] for i in (ROW, FIRST, COUNT, POSITION))
    end = position + count
    last = _blocks(end + BLOCK - 1)
    first = common = 0
    if sizes.window is not None:
        first = _blocks(position - sizes.window + 1)
        common = jnp.minimum(_blocks(end - sizes.window + BLOCK - 1), last)
    diagonal = jnp.maximum(_blocks(position + 1), common)
    return _Tile(row, token, count, position, end, first, common, diagonal, last)


def _blocks(keys: jax.Array) -> jax.Array:
    """Whole blocks in so many keys; none in a negative number."""
    return lax.div(jnp.maximum(keys, 0), jnp.int32(BLOCK))


def _step(tile: _Tile, block: jax.Array | int) -> jax.Array:
    return lax.rem(jnp.int32(block - tile.first), jnp.int32(STEPS))


def _load(
    sizes: _Sizes,
    tile: _Tile,
    kv_head: jax.Array,
    k_pages: Ref,  # [P, S, K, H]
    v_pages: Ref,  # [P, S, K, H]
    page_table: Ref,  # int32[R, M]
    shared: _Shared,
) -> None:
    """Copy blocks as room becomes free: each warp its share of the pages of keys or of values.

    A warp issues a copy without a barrier of its warpgroup, and neither waits for the other's room.
    """
    readers = min(READERS, sizes.pages)
    keys = (k_pages, shared.k, shared.k_full, shared.k_free)
    values = (v_pages, shared.v, shared.v_full, shared.v_free)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        for i, stream in enumerate((keys, values)):
            for share in range(readers):
                copy = partial(_copy_share, sizes, tile, kv_head, page_table, *stream)
                pl.when(warp == i * readers + share)(partial(copy, share, readers))


def _copy_share(
    sizes: _Sizes,
    tile: _Tile,
    kv_head: jax.Array,
    page_table: Ref,  # int32[R, M]
    pool: Ref,  # [P, S, K, H]
    room: Ref,  # [STEPS, BLOCK, H]
    full: Ref,
    free: Ref,
    share: int,
    shares: int,
) -> None:
    """One warp's copies: every ``shares``-th page from ``share`` on."""
    own = range(share, sizes.pages, shares)
    last_page = lax.div(jnp.maximum(tile.end - 1, 0), jnp.int32(sizes.page_size))

    def pages_of(block: jax.Array | int) -> tuple[jax.Array, ...]:
        # Entries past the row's pages may be junk: a page that is there stands in for them.
        places = (jnp.minimum(block * sizes.pages + i, last_page) for i in own)
        return tuple(page_table[tile.row, place] for place in places)

    def copy(block: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step = _step(tile, block)
        following = pages_of(block + 1)  # in flight while this block waits for room
        pl.when(block - tile.first >= STEPS)(lambda: plgpu.barrier_wait(free.at[step]))
        for i, page in zip(own, pages, strict=True):
            to = room.at[step, pl.ds(i * sizes.page_size, sizes.page_size)]
            source = pool.at[page, pl.ds(0, sizes.page_size), kv_head]
            plgpu.copy_gmem_to_smem(source, to, full.at[step])
        return following

    lax.fori_loop(tile.first, tile.last, copy, pages_of(tile.first))

    @pl.loop(jnp.maximum(tile.last - STEPS, tile.first), tile.last)
    def _see_through(block: jax.Array) -> None:  # a barrier left early is an error
        plgpu.barrier_wait(free.at[_step(tile, block)])


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _zeros(shape: tuple[int, ...], layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def _clear_unwritten(sizes: _Sizes, v: Ref, left: jax.Array) -> None:  # [BLOCK, H]
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

    sizes: _Sizes
    tile: _Tile
    index: jax.Array
    position: jax.Array  # of its first query
    shared: _Shared

    def take_turn(self) -> None:
        plgpu.barrier_wait(self.shared.turn.at[self.index])

    def pass_turn(self) -> None:
        plgpu.barrier_arrive(self.shared.turn.at[WORKERS - 1 - self.index])

    def await_keys(self, block: jax.Array | int) -> None:
        """Wait for a block of keys, if the tile has it."""

        @pl.when(block < self.tile.last)
        def _wait() -> None:
            plgpu.barrier_wait(self.shared.k_full.at[_step(self.tile, block)])

    def score(self, scores: Ref, step: jax.Array) -> None:
        """Begin to multiply queries and keys."""
        plgpu.wgmma(scores, self.shared.q.at[self.index], self.shared.k.at[step].transpose((1, 0)))

    def weigh(
        self,
        scores: jax.Array,  # float32[QUERIES, BLOCK]
        block: jax.Array | int,
        top: jax.Array,  # float32[QUERIES]
        total: jax.Array,  # float32[QUERIES]
        masked: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Top score and total weight so far, what earlier sums shrink by, and the weights."""
        sizes = self.sizes
        if masked:
            shape = (QUERIES, BLOCK)
            newest = _iota(shape, 0) + self.position
            key = _iota(shape, 1) + block * BLOCK
            visible = key <= newest
            if sizes.window is not None:
                visible &= key > newest - sizes.window
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * sizes.scale)
        base = new_top
        if masked and sizes.window is not None:
            # A query whose window begins later has seen nothing yet: -inf - -inf would be NaN.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp2(top - base)
        weights = jnp.exp2(scores * sizes.scale - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        return new_top, total, shrink, weights

    def first_block(self, top: jax.Array, total: jax.Array) -> _Weighed:
        """Weights of the first block of keys."""
        block, step = self.tile.first, jnp.int32(0)
        self.await_keys(block)
        self.take_turn()

        def multiply(scores: Ref) -> jax.Array:
            self.score(scores, step)
            self.pass_turn()
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
        step, before = (_step(self.tile, b) for b in (block, block - 1))
        self.take_turn()

        def multiply(scores: Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            self.score(scores, step)
            plgpu.barrier_wait(shared.v_full.at[before])

            weights = _zeros((QUERIES, BLOCK))

            def weigh() -> tuple[jax.Array, ...]:
                self.pass_turn()
                # Scores alone: the product begun after theirs is still under way.
                values = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                plgpu.barrier_arrive(shared.k_free.at[step])
                results = lax.optimization_barrier(self.weigh(values, block, top, total, masked))
                # The compiler moves the wait for the product to before the softmax, but for this.
                self.await_keys(block + 1)
                return results

            init = (top, total, total, weights)
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
        step = _step(self.tile, block)
        plgpu.barrier_wait(shared.v_full.at[step])
        _clear_unwritten(self.sizes, shared.v.at[step], self.tile.end - block * BLOCK)
        self.take_turn()
        acc, _ = _accumulate(acc, weights, shared.v.at[step])
        pl.when(self.index == 0)(self.pass_turn)
        plgpu.barrier_arrive(shared.v_free.at[step])
        return acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])

    def attend(self) -> jax.Array:  # float32[QUERIES, H]
        """Attention over all the tile's keys, of which there is one at least."""
        tile, shape = self.tile, (QUERIES, self.sizes.head_dim)
        pl.when(self.index == 1)(self.pass_turn)  # the first worker begins

        nothing = _zeros((QUERIES,), plgpu.Layout.WGMMA.reduce(1))
        sums = _zeros(shape), self.first_block(nothing - jnp.inf, nothing)
        with_masks, without = (partial(self.next_block, masked) for masked in (True, False))
        second = tile.first + 1
        if self.sizes.window is not None:
            sums = lax.fori_loop(second, tile.common, with_masks, sums)
        sums = lax.fori_loop(jnp.maximum(tile.common, second), tile.diagonal, without, sums)
        sums = lax.fori_loop(jnp.maximum(tile.diagonal, second), tile.last, with_masks, sums)
        return self.last_values(sums)


def _work(
    worker: _Worker,
    head: jax.Array,  # the worker's query head
    offset: jax.Array,  # of the worker's first query in the tile
    q: Ref,  # [T, N, H]
    out: Ref,  # [T, N, H]
) -> None:
    """Attention of one worker's queries, from global memory to global memory."""
    tile, shared, index = worker.tile, worker.shared, worker.index
    queries = (pl.ds(tile.token + offset, QUERIES), head)
    # TMA moves swizzled tiles at multiples of 8 tokens alone, and rows begin anywhere.
    plain = shared.plain.at[index]

    @pl.when(tile.first < tile.last)
    def _attend() -> None:
        plgpu.copy_gmem_to_smem(q.at[queries], plain, shared.q_full.at[index])
        plgpu.barrier_wait(shared.q_full.at[index])
        shared.q[index] = plgpu.load(plain, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        plain[...] = worker.attend().astype(out.dtype)

    @pl.when(tile.first == tile.last)
    def _padding() -> None:
        zeros = jnp.zeros((QUERIES, worker.sizes.head_dim), out.dtype)
        plain[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    plgpu.commit_smem()
    count = tile.count - offset

    @pl.when(count >= QUERIES)
    def _store_tile() -> None:
        plgpu.copy_smem_to_gmem(plain, out.at[queries])

    @pl.when(count < QUERIES)
    def _store_queries() -> None:
        @pl.loop(0, jnp.maximum(count, 0))
        def _query(i: jax.Array) -> None:
            to = out.at[pl.ds(tile.token + offset + i, 1), head]
            plgpu.copy_smem_to_gmem(plain.at[pl.ds(i, 1)], to)

    plgpu.wait_smem_to_gmem(0)


def _kernel(
    q: Ref,  # [T, N, H]
    k_pages: Ref,  # [P, S, K, H]
    v_pages: Ref,  # [P, S, K, H]
    page_table: Ref,  # int32[R, M]
    tiles: Ref,  # int32[tiles, 4]
    out: Ref,  # [T, N, H]
    *,
    sizes: _Sizes,
    shared: _Shared,
) -> None:
    tile = _read_tile(sizes, tiles, lax.axis_index("tile"))
    first_head = lax.axis_index("heads") * sizes.tile_heads
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(tile.count > 0)
    def _tile() -> None:
        @pl.when(warpgroup < WORKERS)
        def _attend() -> None:
            plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
            pairs = sizes.tile_heads == WORKERS
            head = first_head + (warpgroup if pairs else 0)
            offset = jnp.int32(0) if pairs else warpgroup * QUERIES
            worker = _Worker(sizes, tile, warpgroup, tile.position + offset, shared)
            _work(worker, head, offset, q, out)

        @pl.when(warpgroup == WORKERS)
        def _fetch() -> None:
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            kv_head = lax.div(first_head, jnp.int32(sizes.group))
            _load(sizes, tile, kv_head, k_pages, v_pages, page_table, shared)


def _shared_types(sizes: _Sizes, dtype: Any) -> dict[str, Any]:
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    queries, block = (WORKERS, QUERIES, sizes.head_dim), (STEPS, BLOCK, sizes.head_dim)
    pages = plgpu.Barrier(num_arrivals=sizes.pages, num_barriers=STEPS)
    workers = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=STEPS)
    q, plain = plgpu.SMEM(queries, dtype, transforms=swizzled), plgpu.SMEM(queries, dtype)
    return {
        "queries": plgpu.RefUnion(q, plain),
        "k": plgpu.SMEM(block, dtype, transforms=swizzled),
        "v": plgpu.SMEM(block, dtype, transforms=swizzled),
        "q_full": plgpu.Barrier(num_barriers=WORKERS),
        "k_full": pages,
        "v_full": pages,
        "k_free": workers,
        "v_free": workers,
        "turn": plgpu.Barrier(num_barriers=WORKERS),
    }


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
    (t, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    group, scale = n // num_kv_heads, scale * math.log2(math.e)
    sizes = _Sizes(h, page_size, group, scale, window)
    tiles = _tile_table(query_start_loc, seq_lens, t, sizes.tile_tokens)

    def body(*refs: Ref, queries: Ref, **scratch: Ref) -> None:
        swizzled, plain = queries
        _kernel(*refs, sizes=sizes, shared=_Shared(q=swizzled, plain=plain, **scratch))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_shared_types(sizes, q.dtype),
        grid=(tiles.shape[0], n // sizes.tile_heads),  # the last varies fastest
        grid_names=("tile", "heads"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_prefill",
    )(q, k_pages, v_pages, page_table, tiles)
