"""What the Mosaic kernel of paged_prefill knows and holds: sizes, memory, whose tiles are which.

Owns: ``Sizes``, ``Arrays``, ``Shared``, ``Tile``, ``tile_table``, ``over_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_device
from pallas_kernels.paged_prefill.launch import (
    ALIGNED,
    BLOCK,
    CLUSTER,
    QUERIES,
    STEPS,
    WORKERS,
)

ROW, EIGHTH, LEAD, COUNT, POSITION = range(5)  # columns of the table of tiles
TURNS = 2  # of a program's tiles have their queries in shared memory

type Ref = Any


@dataclass(frozen=True)
class Sizes:
    """What is known when the kernel is compiled."""

    head_dim: int
    page_size: int
    num_heads: int  # of queries
    group: int  # query heads of a kv head
    scale: float  # of scores, log2(e) included; positive
    window: int | None
    num_tiles: int = 0  # of the table, those that hold no tokens included

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return BLOCK // self.page_size

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile: one for each worker, where a kv head has so many."""
        return WORKERS if self.group % WORKERS == 0 else 1

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return QUERIES * WORKERS // self.tile_heads

    @property
    def cluster(self) -> int:
        """Programs that load a kv head's pages together, each for other heads and the same tokens;
        1 where a kv head has too few query heads.
        """
        return CLUSTER if self.group % (CLUSTER * WORKERS) == 0 else 1

    @property
    def together(self) -> str | None:
        """Axis along which programs load pages together. So they free them together."""
        return "rank" if self.cluster > 1 else None

    @property
    def columns(self) -> int:
        """Items of a tile of the table, one after the other: they share its page ids. A cluster
        takes an item.
        """
        return self.num_heads // (self.tile_heads * self.cluster)

    @property
    def clusters(self) -> int:
        """Of programs, as many as there are multiprocessors for where there are as many items."""
        return min(current_device().multiprocessors // self.cluster, self.num_tiles * self.columns)


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    q: Ref  # [TURNS, WORKERS, QUERIES, H]
    results: tuple[Ref, Ref]  # [WORKERS, QUERIES, H]: one room, plain and swizzled
    k: Ref  # [STEPS, BLOCK, H]
    v: Ref  # [STEPS, BLOCK, H]
    q_full: Ref  # [TURNS * WORKERS]
    q_free: Ref  # [TURNS * WORKERS]
    k_full: Ref  # [STEPS]: one arrival a page
    v_full: Ref  # [STEPS]: one arrival a page
    k_free: Ref  # [STEPS]: one arrival a worker of the cluster
    v_free: Ref  # [STEPS]: one arrival a worker of the cluster


class Tile(NamedTuple):
    """What a program attends to; int32 scalars. Blocks count from the start of the context."""

    head: jax.Array  # the first
    row: jax.Array
    token: jax.Array  # the first query, in q
    lead: jax.Array  # queries that belong to the row before
    count: jax.Array  # queries up to the row's end, those included; the rest of the tile overhangs
    position: jax.Array  # of the first query in the row's context, negative if it lies before that
    end: jax.Array  # keys from here on are not seen, perhaps not written
    first: jax.Array | int  # block
    common: jax.Array | int  # from this block on every query sees everything ...
    diagonal: jax.Array  # ... before this one
    last: jax.Array  # one past the last block
    before: jax.Array  # blocks of the cluster's earlier tiles: steps go round across them
    turn: jax.Array  # of the cluster; those without keys come last


class Arrays(NamedTuple):
    """What lies in global memory."""

    q: Ref  # [T, N, H]
    k_pages: Ref  # [P, S, K, H]
    v_pages: Ref  # [P, S, K, H]
    page_table: Ref  # int32[R, M]
    tiles: Ref  # int32[tiles, 5]
    num_tiles: Ref  # int32[1]: the first so many hold tokens
    out: Ref  # [T, N, H]


class _Entry(NamedTuple):
    """A place of the table of tiles, and a head; int32 scalars."""

    head: jax.Array
    row: jax.Array
    eighth: jax.Array  # the first token, in units of ``ALIGNED``
    lead: jax.Array
    count: jax.Array
    position: jax.Array


def tile_table(
    query_start_loc: jax.Array,  # int32[R + 1]
    seq_lens: jax.Array,  # int32[R]
    num_tokens: int,
    tile_tokens: int,
) -> tuple[jax.Array, jax.Array]:  # int32[tiles, 5], int32[1]
    """Tiles of all rows, those with the longest contexts first, and how many hold tokens.

    A row's tiles begin at a multiple of ``ALIGNED`` tokens: the first may begin with the last
    tokens of the row before. Row r owns the tiles from ``query_start_loc[r] // tile_tokens + r``
    on, at least as many as it fills; the padding behind the last row is one more row, of no
    context. Spare tiles count 0.
    """
    num_rows = seq_lens.shape[0] + 1
    starts = jnp.append(query_start_loc, jnp.int32(num_tokens))
    lens = jnp.append(seq_lens, jnp.int32(0))
    owned_from = starts[:-1] // tile_tokens + jnp.arange(num_rows, dtype=jnp.int32)
    tile = jnp.arange(num_tokens // tile_tokens + num_rows, dtype=jnp.int32)
    row = jnp.sum(owned_from <= tile[:, None], axis=1, dtype=jnp.int32) - 1
    start, end = starts[row], starts[row + 1]
    token = start // ALIGNED * ALIGNED + (tile - owned_from[row]) * tile_tokens
    lead = jnp.maximum(start - token, 0)
    count = jnp.minimum(end - token, tile_tokens)
    count = jnp.where(count > lead, count, 0)
    position = lens[row] - (end - token)
    blocks = jnp.where(count > 0, (jnp.maximum(position + count, 0) + BLOCK - 1) // BLOCK, -1)
    own = jnp.minimum(row, num_rows - 2)
    table = jnp.stack([own, token // ALIGNED, lead, count, position], axis=1)
    num_tiles = jnp.sum(count > 0, dtype=jnp.int32, keepdims=True)
    return table[_descending(blocks)], num_tiles


def _descending(keys: jax.Array) -> jax.Array:  # int32[n] -> int32[n]
    """Indices of the keys, largest first, those of equals in order; without a sort of XLA's."""
    index = jnp.arange(keys.shape[0], dtype=jnp.int32)
    later = (keys > keys[:, None]) | ((keys == keys[:, None]) & (index < index[:, None]))
    place = jnp.sum(later, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place == index[:, None], index, 0), axis=1, dtype=jnp.int32)


def _slot(sizes: Sizes, turn: jax.Array) -> jax.Array:
    """Clusters take a round of items from either end in turn, as each is shorter than the last."""
    cluster = lax.axis_index("cluster")
    return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, cluster, sizes.clusters - 1 - cluster)


def _turns(sizes: Sizes, arrays: Arrays) -> jax.Array:
    """How many items, tiles of some heads, the program's cluster takes."""
    items, clusters = arrays.num_tiles[0] * sizes.columns, jnp.int32(sizes.clusters)
    whole = lax.div(items, clusters)
    return whole + (_slot(sizes, whole) < lax.rem(items, clusters)).astype(jnp.int32)


def _read_entry(sizes: Sizes, arrays: Arrays, turn: jax.Array) -> _Entry:
    """The program's part of a turn's item, perhaps of a turn that its cluster does not have."""
    item = turn * sizes.clusters + _slot(sizes, turn)
    columns = jnp.int32(sizes.columns)
    index = jnp.minimum(lax.div(item, columns), arrays.tiles.shape[0] - 1)
    entry = (arrays.tiles[index, i] for i in (ROW, EIGHTH, LEAD, COUNT, POSITION))
    first = lax.rem(item, columns) * sizes.cluster + lax.axis_index("rank")
    return _Entry(first * sizes.tile_heads, *entry)


def _tile_of(sizes: Sizes, entry: _Entry, before: jax.Array, turn: jax.Array) -> Tile:
    head, row, eighth, lead, count, position = entry
    end = position + count
    last = _blocks(end + BLOCK - 1)
    first = common = 0
    if sizes.window is not None:
        first = _blocks(position - sizes.window + 1)
        common = jnp.minimum(_blocks(end - sizes.window + BLOCK - 1), last)
    diagonal = jnp.maximum(_blocks(position + 1), common)
    blocks = (first, common, diagonal, last)
    token = eighth * ALIGNED  # by which Mosaic sees that it is a multiple
    return Tile(head, row, token, lead, count, position, end, *blocks, before, turn)


def over_tiles(
    sizes: Sizes, arrays: Arrays, attend: Callable[[Tile], None]
) -> tuple[jax.Array, jax.Array]:
    """Call with each of the program's tiles in turn; how many have keys, and blocks of all."""

    def one(turn: jax.Array, carry: tuple[_Entry, Any, Any]) -> tuple[_Entry, Any, Any]:
        entry, attended, before = carry
        following = _read_entry(sizes, arrays, turn + 1)  # on its way during this turn
        tile = _tile_of(sizes, entry, before, turn)
        attend(tile)
        attended += (tile.first < tile.last).astype(jnp.int32)
        return following, attended, before + tile.last - tile.first

    start = _read_entry(sizes, arrays, jnp.int32(0)), jnp.int32(0), jnp.int32(0)
    return lax.fori_loop(jnp.int32(0), _turns(sizes, arrays), one, start)[1:]


def _blocks(keys: jax.Array) -> jax.Array:
    """Whole blocks in so many keys; none in a negative number."""
    return lax.div(jnp.maximum(keys, 0), jnp.int32(BLOCK))


def step_of(tile: Tile, block: jax.Array | int) -> jax.Array:
    """Where a block lies in shared memory."""
    return lax.rem(tile.before + block - tile.first, jnp.int32(STEPS))


def room_of(turn: jax.Array, worker: Any) -> tuple[jax.Array, Any]:
    """Where a worker's queries of a turn lie in shared memory, and the number of their barrier."""
    place = lax.rem(turn, jnp.int32(TURNS))
    return place, place * WORKERS + worker


def share_of(sizes: Sizes, worker: Any) -> tuple[Any, Any]:
    """Which head of a tile is a worker's, and which token of it its first."""
    return (worker, 0) if sizes.tile_heads == WORKERS else (0, worker * QUERIES)


def shared_types(sizes: Sizes, dtype: Any) -> dict[str, Any]:
    """``Shared``, as a kernel asks for it."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    queries, block = (WORKERS, QUERIES, sizes.head_dim), (STEPS, BLOCK, sizes.head_dim)
    plain = plgpu.SMEM(queries, dtype)  # single rows leave it, where a tile overhangs
    pages = plgpu.Barrier(num_arrivals=sizes.pages, num_barriers=STEPS)
    workers: Any = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=STEPS)
    if sizes.together:
        workers = plgpu.ClusterBarrier(
            collective_axes=(sizes.together,), num_arrivals=WORKERS, num_barriers=STEPS
        )
    return {
        "q": plgpu.SMEM((TURNS, *queries), dtype, transforms=swizzled),
        "results": plgpu.RefUnion(plain, plgpu.SMEM(queries, dtype, transforms=swizzled)),
        "k": plgpu.SMEM(block, dtype, transforms=swizzled),
        "v": plgpu.SMEM(block, dtype, transforms=swizzled),
        "q_full": plgpu.Barrier(num_barriers=TURNS * WORKERS),
        "q_free": plgpu.Barrier(num_barriers=TURNS * WORKERS),
        "k_full": pages,
        "v_full": pages,
        "k_free": workers,
        "v_free": workers,
    }
