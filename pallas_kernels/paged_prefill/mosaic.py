"""paged_prefill in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A program has three warpgroups. One copies pages into shared memory by TMA, blocks of keys and
values ahead of the other two; each of those attends for 64 queries of one head, its products on the
matrix units straight from shared memory. The two take turns: while one weighs scores, the other
multiplies. They share the keys: two heads of one kv head over the same tokens, or, where a kv head
has an odd number of query heads, one head over 128 tokens. The method is that of FlashAttention-3
(Shah et al., 2024, arXiv:2407.08608). Softmax runs in base 2, sums in float32.
Must not know: which calls come here (``launch``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.launch import BLOCK, QUERIES, WORKERS

STEPS = 2  # blocks of keys, and of values, in flight
ROW, FIRST, COUNT, POSITION = range(4)  # columns of the table of tiles
WORKER_REGISTERS, LOADER_REGISTERS = 232, 40  # of a thread: 504 of the 512 there are for three

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
    def tile_heads(self) -> int:
        return WORKERS if self.group % WORKERS == 0 else 1

    @property
    def tile_tokens(self) -> int:
        return QUERIES * WORKERS // self.tile_heads


class _Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    q: Ref  # [WORKERS, QUERIES, H]
    k: Ref  # [STEPS, BLOCK, H]
    v: Ref  # [STEPS, BLOCK, H]
    plain: Ref  # [WORKERS, QUERIES, H]: queries, then results, not swizzled
    q_full: Ref  # [WORKERS]
    k_full: Ref  # [STEPS]: one arrival a page
    v_full: Ref  # [STEPS]: one arrival a page
    k_free: Ref  # [STEPS]: one arrival a worker
    v_free: Ref  # [STEPS]: one arrival a worker
    turn: Ref  # the workers meet here


class _Tile(NamedTuple):
    """What a program attends to; int32 scalars. Blocks count from the start of the context."""

    row: jax.Array
    token: jax.Array  # the first query, in q
    count: jax.Array  # queries that belong to the row; the rest of the tile overhangs
    position: jax.Array  # of the first query in its context
    end: jax.Array  # keys from here on are not seen, perhaps not written
    first: jax.Array  # block
    common: jax.Array  # from this block on every query sees everything ...
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
    last = _blocks(end + (BLOCK - 1))
    first, common = jnp.int32(0), jnp.int32(0)
    if sizes.window is not None:
        first = _blocks(position - sizes.window + 1)
        common = jnp.minimum(_blocks(end - sizes.window + (BLOCK - 1)), last)
    diagonal = jnp.maximum(_blocks(position + 1), common)
    return _Tile(row, token, count, position, end, first, common, diagonal, last)


def _blocks(keys: jax.Array) -> jax.Array:
    """Whole blocks in so many keys; none in a negative number."""
    return lax.div(jnp.maximum(keys, 0), jnp.int32(BLOCK))


def _step(tile: _Tile, block: jax.Array) -> jax.Array:
    return lax.rem(block - tile.first, jnp.int32(STEPS))


def _load(
    sizes: _Sizes,
    tile: _Tile,
    kv_head: jax.Array,
    k_pages: Ref,  # [P, S, K, H]
    v_pages: Ref,  # [P, S, K, H]
    page_table: Ref,  # int32[R, M]
    shared: _Shared,
) -> None:
    """Copy block after block as room becomes free."""
    pages = BLOCK // sizes.page_size
    last_page = lax.div(jnp.maximum(tile.end - 1, 0), jnp.int32(sizes.page_size))

    @pl.loop(tile.first, tile.last + STEPS)  # the last turns only see every barrier through
    def _block(block: jax.Array) -> None:
        step = _step(tile, block)
        reused = block - tile.first >= STEPS
        wanted = block < tile.last
        # Entries past the row's pages may be junk: a page that is there stands in for them.
        ids = [
            page_table[tile.row, jnp.minimum(block * pages + i, last_page)] for i in range(pages)
        ]

        def copy(pool: Ref, room: Ref, full: Ref, free: Ref) -> None:
            pl.when(reused)(lambda: plgpu.barrier_wait(free.at[step]))

            @pl.when(wanted)
            def _copy() -> None:
                for i, page in enumerate(ids):
                    to = room.at[step, pl.ds(i * sizes.page_size, sizes.page_size)]
                    source = pool.at[page, pl.ds(0, sizes.page_size), kv_head]
                    plgpu.copy_gmem_to_smem(source, to, full.at[step])

        copy(k_pages, shared.k, shared.k_full, shared.k_free)
        copy(v_pages, shared.v, shared.v_full, shared.v_free)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


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


def _meet(barrier: Ref) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _accumulate(
    acc: jax.Array,  # float32[QUERIES, H]
    weights: jax.Array,  # [QUERIES, BLOCK]
    v: Ref,  # [BLOCK, H]
) -> jax.Array:  # float32[QUERIES, H]
    """Add weights * values in the registers of the sum. JAX's interpreter cannot do this."""
    init: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v))(init)


type _Sums = tuple[jax.Array, jax.Array, jax.Array]  # acc [QUERIES, H]; top, total [QUERIES]


def _block_body(
    sizes: _Sizes,
    tile: _Tile,
    worker: jax.Array,
    position: jax.Array,
    shared: _Shared,
    masked: bool,
) -> Callable[[jax.Array, _Sums], _Sums]:
    """One block of keys. The workers meet twice in it, one of them half a block ahead."""

    def body(block: jax.Array, sums: _Sums) -> _Sums:
        acc, top, total = sums
        step = _step(tile, block)
        plgpu.barrier_wait(shared.k_full.at[step])

        def multiply(scores: Ref) -> jax.Array:
            plgpu.wgmma(scores, shared.q.at[worker], shared.k.at[step].transpose((1, 0)))
            _meet(shared.turn)
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((QUERIES, BLOCK), jnp.float32))
        plgpu.barrier_arrive(shared.k_free.at[step])
        if masked:
            newest = _iota(scores.shape, 0) + position
            key = _iota(scores.shape, 1) + block * BLOCK
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
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + weights.sum(axis=1)
        narrow = weights.astype(shared.v.dtype)
        # All of the softmax happens before the other worker's turn.
        acc, total, new_top, narrow = lax.optimization_barrier((acc, total, new_top, narrow))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.v_full.at[step])
        if masked:
            _clear_unwritten(sizes, shared.v.at[step], tile.end - block * BLOCK)
        plgpu.barrier_wait(shared.turn)

        acc = _accumulate(acc, narrow, shared.v.at[step])
        plgpu.barrier_arrive(shared.v_free.at[step])
        return acc, new_top, total

    return body


def _attend(
    sizes: _Sizes,
    tile: _Tile,
    worker: jax.Array,
    head: jax.Array,  # the worker's query head
    offset: jax.Array,  # of the worker's first query in the tile
    q: Ref,  # [T, N, H]
    out: Ref,  # [T, N, H]
    shared: _Shared,
) -> None:
    """Attention of one worker's queries."""
    queries = (pl.ds(tile.token + offset, QUERIES), head)
    # TMA moves swizzled tiles at multiples of 8 tokens alone, and rows begin anywhere.
    plain = shared.plain.at[worker]
    plgpu.copy_gmem_to_smem(q.at[queries], plain, shared.q_full.at[worker])
    plgpu.barrier_wait(shared.q_full.at[worker])
    shared.q[worker] = plgpu.load(plain, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()

    def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    by_query = plgpu.Layout.WGMMA.reduce(1)
    sums = (
        full((QUERIES, sizes.head_dim), 0.0, plgpu.Layout.WGMMA),
        full((QUERIES,), -jnp.inf, by_query),
        full((QUERIES,), 0.0, by_query),
    )
    pl.when(worker == 1)(lambda: _meet(shared.turn))
    place = (worker, tile.position + offset, shared)
    with_masks, without = (_block_body(sizes, tile, *place, masked) for masked in (True, False))
    if sizes.window is not None:
        sums = lax.fori_loop(tile.first, tile.common, with_masks, sums)
    sums = lax.fori_loop(tile.common, tile.diagonal, without, sums)
    acc, _, total = lax.fori_loop(tile.diagonal, tile.last, with_masks, sums)
    pl.when(worker == 0)(lambda: _meet(shared.turn))

    total = jnp.where(total == 0.0, 1.0, total)  # padding has seen nothing
    acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
    plain[...] = acc.astype(out.dtype)
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
        def _work() -> None:
            plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
            pairs = sizes.tile_heads == WORKERS
            head = first_head + (warpgroup if pairs else 0)
            offset = jnp.int32(0) if pairs else warpgroup * QUERIES
            _attend(sizes, tile, warpgroup, head, offset, q, out, shared)

        @pl.when(warpgroup == WORKERS)
        def _fetch() -> None:
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            kv_head = lax.div(first_head, jnp.int32(sizes.group))
            _load(sizes, tile, kv_head, k_pages, v_pages, page_table, shared)


def _shared_types(sizes: _Sizes, dtype: Any) -> _Shared:
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    queries, block = (WORKERS, QUERIES, sizes.head_dim), (STEPS, BLOCK, sizes.head_dim)
    pages = plgpu.Barrier(num_arrivals=BLOCK // sizes.page_size, num_barriers=STEPS)
    workers = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=STEPS)
    return _Shared(
        q=plgpu.SMEM(queries, dtype, transforms=swizzled),
        k=plgpu.SMEM(block, dtype, transforms=swizzled),
        v=plgpu.SMEM(block, dtype, transforms=swizzled),
        plain=plgpu.SMEM(queries, dtype),
        q_full=plgpu.Barrier(num_barriers=WORKERS),
        k_full=pages,
        v_full=pages,
        k_free=workers,
        v_free=workers,
        turn=plgpu.Barrier(num_arrivals=WORKERS),
    )


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
    sizes = _Sizes(h, page_size, n // num_kv_heads, scale * math.log2(math.e), window)
    tiles = _tile_table(query_start_loc, seq_lens, t, sizes.tile_tokens)

    def body(*refs: Ref, **scratch: Ref) -> None:
        _kernel(*refs, sizes=sizes, shared=_Shared(**scratch))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_shared_types(sizes, q.dtype)._asdict(),
        grid=(tiles.shape[0], n // sizes.tile_heads),  # heads side by side, longest tiles first
        grid_names=("tile", "heads"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_prefill",
    )(q, k_pages, v_pages, page_table, tiles)
