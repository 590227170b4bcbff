"""Static description of the Mosaic kernel of paged_prefill: constants, memory, tile schedule.

Owns: ``PrefillSpec``, ``GmemRefs``, ``PrefillScratch``, ``Tile``, ``tile_table``,
``for_each_tile``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.device import current_device
from pallas_kernels.paged_prefill.launch import (
    BLOCK,
    CLUSTER,
    MMA_QUERIES,
    STAGES,
    TOKEN_ALIGNMENT,
)

ROW, ALIGNED_TOKEN, LEAD, COUNT, POSITION = range(5)  # columns of the tile table
Q_STAGES = 2  # tiles of a CTA whose queries are in shared memory

type Ref = Any


@dataclass(frozen=True)
class PrefillSpec:
    """Compile-time constants of the kernel."""

    head_dim: int
    page_size: int
    num_heads: int  # of queries
    group: int  # query heads per kv head
    scale: float  # of scores, times log2(e); positive
    window: int | None
    warpgroups: int  # compute warpgroups of a CTA
    num_tiles: int = 0  # entries of the tile table, spare ones included

    @property
    def pages_per_block(self) -> int:
        """Pages per block of keys."""
        return BLOCK // self.page_size

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile: one per compute warpgroup, if these divide those of a kv head."""
        return self.warpgroups if self.group % self.warpgroups == 0 else 1

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return MMA_QUERIES * self.warpgroups // self.tile_heads

    @property
    def cluster(self) -> int:
        """CTAs that load the pages of a kv head together, for different heads of the same tokens; 1
        if a kv head has too few query heads.
        """
        return CLUSTER if self.group % (CLUSTER * self.tile_heads) == 0 else 1

    @property
    def multicast_axis(self) -> str | None:
        """Axis of the CTAs that load pages together, and so also release them together."""
        return "rank" if self.cluster > 1 else None

    @property
    def items_per_tile(self) -> int:
        """Consecutive work items of a table entry; a cluster computes an item. They share pages."""
        return self.num_heads // (self.tile_heads * self.cluster)

    @property
    def clusters(self) -> int:
        """Number of resident clusters: one CTA per SM, if there are enough work items."""
        num_items = self.num_tiles * self.items_per_tile
        return min(current_device().num_sms // self.cluster, num_items)


class PrefillScratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    k_smem: Ref  # [STAGES, BLOCK, H]
    q_smem: Ref  # [Q_STAGES, warpgroups, MMA_QUERIES, H]
    out_smem: tuple[Ref, Ref]  # [warpgroups, MMA_QUERIES, H]: plain and swizzled view
    v_smem: Ref  # [STAGES, BLOCK, H]
    k_consumed_barriers: Ref  # [STAGES]: one arrival per compute warpgroup of the cluster
    k_barriers: Ref  # [STAGES]: one arrival per page
    q_consumed_barriers: Ref  # [Q_STAGES * warpgroups]
    q_barriers: Ref  # [Q_STAGES * warpgroups]
    v_consumed_barriers: Ref  # [STAGES]: one arrival per compute warpgroup of the cluster
    v_barriers: Ref  # [STAGES]: one arrival per page


class Tile(NamedTuple):
    """A CTA's tile; int32 scalars. Blocks are counted from the start of the context."""

    head: jax.Array  # first query head
    row: jax.Array
    token: jax.Array  # first query, in q
    lead: jax.Array  # leading queries that belong to the previous row
    count: jax.Array  # queries up to the row's end, with those; the rest is past the row's end
    position: jax.Array  # of the first query in the row's context; negative before its start
    end: jax.Array  # keys from here on are not visible and may be unwritten
    first_block: jax.Array | int
    common_block: jax.Array | int  # every query sees all keys from this block on ...
    diagonal_block: jax.Array  # ... to before this one
    end_block: jax.Array  # one past the last block
    blocks_before: jax.Array  # blocks of the cluster's earlier tiles; stages continue across them
    index: jax.Array  # among the tiles of the cluster; tiles without keys come last


class GmemRefs(NamedTuple):
    """Refs to the arrays in global memory."""

    q: Ref  # [T, N, H]
    k_pages: Ref  # [P, S, K, H]
    v_pages: Ref  # [P, S, K, H]
    page_table: Ref  # int32[R, M]
    tiles: Ref  # int32[tiles, 5]
    num_tiles: Ref  # int32[1]: the tiles that have tokens come first
    out: Ref  # [T, N, H]
    sinks: Ref | None = None  # [N]


class _TableEntry(NamedTuple):
    """An entry of the tile table, and a head; int32 scalars."""

    head: jax.Array
    row: jax.Array
    aligned_token: jax.Array  # first token, divided by ``TOKEN_ALIGNMENT``
    lead: jax.Array
    count: jax.Array
    position: jax.Array


def tile_table(
    query_start_loc: jax.Array,  # int32[R + 1]
    seq_lens: jax.Array,  # int32[R]
    num_tokens: int,
    tile_tokens: int,
) -> tuple[jax.Array, jax.Array]:  # int32[tiles, 5], int32[1]
    """The tiles of all rows, longest contexts first, and the number of tiles that have tokens.

    A row's tiles start at multiples of ``TOKEN_ALIGNMENT`` tokens: the first one may start with the
    last tokens of the previous row. Row r has the tiles from ``query_start_loc[r] // tile_tokens +
    r`` on, at least as many as it needs; the padding after the last row is one more row, without
    context. Spare tiles have count 0.
    """
    num_rows = seq_lens.shape[0] + 1
    starts = jnp.append(query_start_loc, jnp.int32(num_tokens))
    lens = jnp.append(seq_lens, jnp.int32(0))
    first_tile = starts[:-1] // tile_tokens + jnp.arange(num_rows, dtype=jnp.int32)
    tile = jnp.arange(num_tokens // tile_tokens + num_rows, dtype=jnp.int32)
    row = jnp.sum(first_tile <= tile[:, None], axis=1, dtype=jnp.int32) - 1
    start, end = starts[row], starts[row + 1]
    token = start // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT + (tile - first_tile[row]) * tile_tokens
    lead = jnp.maximum(start - token, 0)
    count = jnp.minimum(end - token, tile_tokens)
    count = jnp.where(count > lead, count, 0)
    position = lens[row] - (end - token)
    blocks = jnp.where(count > 0, (jnp.maximum(position + count, 0) + BLOCK - 1) // BLOCK, -1)
    table_row = jnp.minimum(row, num_rows - 2)
    table = jnp.stack([table_row, token // TOKEN_ALIGNMENT, lead, count, position], axis=1)
    num_tiles = jnp.sum(count > 0, dtype=jnp.int32, keepdims=True)
    return table[_argsort_descending(blocks)], num_tiles


def _argsort_descending(keys: jax.Array) -> jax.Array:  # int32[n] -> int32[n]
    """A stable argsort, largest first, without XLA's sort op."""
    index = jnp.arange(keys.shape[0], dtype=jnp.int32)
    precedes = (keys > keys[:, None]) | ((keys == keys[:, None]) & (index < index[:, None]))
    rank = jnp.sum(precedes, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank == index[:, None], index, 0), axis=1, dtype=jnp.int32)


def _wave_slot(spec: PrefillSpec, wave: jax.Array) -> jax.Array:
    """The cluster's slot in a wave of items. Every other wave is reversed, as items get shorter."""
    cluster = lax.axis_index("cluster")
    return jnp.where(lax.rem(wave, jnp.int32(2)) == 0, cluster, spec.clusters - 1 - cluster)


def _cluster_items(spec: PrefillSpec, gmem: GmemRefs) -> jax.Array:
    """Number of work items of the CTA's cluster."""
    items, clusters = gmem.num_tiles[0] * spec.items_per_tile, jnp.int32(spec.clusters)
    full_waves = lax.div(items, clusters)
    in_last_wave = _wave_slot(spec, full_waves) < lax.rem(items, clusters)
    return full_waves + in_last_wave.astype(jnp.int32)


def _read_entry(spec: PrefillSpec, gmem: GmemRefs, wave: jax.Array) -> _TableEntry:
    """The CTA's part of its cluster's item in a wave; the item need not exist."""
    item = wave * spec.clusters + _wave_slot(spec, wave)
    items_per_tile = jnp.int32(spec.items_per_tile)
    index = jnp.minimum(lax.div(item, items_per_tile), gmem.tiles.shape[0] - 1)
    entry = (gmem.tiles[index, i] for i in (ROW, ALIGNED_TOKEN, LEAD, COUNT, POSITION))
    head_tile = lax.rem(item, items_per_tile) * spec.cluster + lax.axis_index("rank")
    return _TableEntry(head_tile * spec.tile_heads, *entry)


def _tile(
    spec: PrefillSpec, entry: _TableEntry, blocks_before: jax.Array, index: jax.Array
) -> Tile:
    head, row, aligned_token, lead, count, position = entry
    end = position + count
    end_block = _num_blocks(end + BLOCK - 1)
    first_block = common_block = 0
    if spec.window is not None:
        first_block = _num_blocks(position - spec.window + 1)
        common_block = jnp.minimum(_num_blocks(end - spec.window + BLOCK - 1), end_block)
    diagonal_block = jnp.maximum(_num_blocks(position + 1), common_block)
    blocks = (first_block, common_block, diagonal_block, end_block)
    token = aligned_token * TOKEN_ALIGNMENT  # Mosaic infers the alignment from this multiplication
    return Tile(head, row, token, lead, count, position, end, *blocks, blocks_before, index)


def for_each_tile(
    spec: PrefillSpec, gmem: GmemRefs, body: Callable[[Tile], None]
) -> tuple[jax.Array, jax.Array]:
    """Call ``body`` with each tile of the CTA; returns the number of tiles that have keys, and the
    number of blocks of all tiles.
    """

    def one(i: jax.Array, carry: tuple[_TableEntry, Any, Any]) -> tuple[_TableEntry, Any, Any]:
        entry, tiles_with_keys, blocks_before = carry
        next_entry = _read_entry(spec, gmem, i + 1)  # in flight during this iteration
        tile = _tile(spec, entry, blocks_before, i)
        body(tile)
        tiles_with_keys += (tile.first_block < tile.end_block).astype(jnp.int32)
        return next_entry, tiles_with_keys, blocks_before + tile.end_block - tile.first_block

    start = _read_entry(spec, gmem, jnp.int32(0)), jnp.int32(0), jnp.int32(0)
    return lax.fori_loop(jnp.int32(0), _cluster_items(spec, gmem), one, start)[1:]


def _num_blocks(keys: jax.Array) -> jax.Array:
    """Whole blocks in a number of keys; 0 for a negative number."""
    return lax.div(jnp.maximum(keys, 0), jnp.int32(BLOCK))


def stage_index(tile: Tile, block: jax.Array | int) -> jax.Array:
    """Pipeline stage of a block."""
    return lax.rem(tile.blocks_before + block - tile.first_block, jnp.int32(STAGES))


def query_stage(spec: PrefillSpec, index: jax.Array, warpgroup: Any) -> tuple[jax.Array, Any]:
    """Stage of a compute warpgroup's queries of a tile in ``q_smem``, and their barrier's index."""
    stage = lax.rem(index, jnp.int32(Q_STAGES))
    return stage, stage * spec.warpgroups + warpgroup


def warpgroup_offsets(spec: PrefillSpec, warpgroup: Any) -> tuple[Any, Any]:
    """Head and first token of a compute warpgroup within a tile."""
    if spec.tile_heads > 1:
        return warpgroup, 0
    return 0, warpgroup * MMA_QUERIES


def scratch_types(spec: PrefillSpec, dtype: Any) -> PrefillScratch:
    """The types of the scratch memory, for ``plgpu.kernel``."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    queries = (spec.warpgroups, MMA_QUERIES, spec.head_dim)
    block = (STAGES, BLOCK, spec.head_dim)
    plain = plgpu.SMEM(queries, dtype)  # for copies of single rows, at the end of a row
    out: Any = plgpu.RefUnion(plain, plgpu.SMEM(queries, dtype, transforms=swizzled))
    barriers = plgpu.Barrier(num_arrivals=spec.pages_per_block, num_barriers=STAGES)
    consumed: Any = plgpu.Barrier(num_arrivals=spec.warpgroups, num_barriers=STAGES)
    if spec.multicast_axis:
        consumed = plgpu.ClusterBarrier(
            collective_axes=(spec.multicast_axis,),
            num_arrivals=spec.warpgroups,
            num_barriers=STAGES,
        )
    return PrefillScratch(
        k_smem=plgpu.SMEM(block, dtype, transforms=swizzled),
        q_smem=plgpu.SMEM((Q_STAGES, *queries), dtype, transforms=swizzled),
        out_smem=out,
        v_smem=plgpu.SMEM(block, dtype, transforms=swizzled),
        k_consumed_barriers=consumed,
        k_barriers=barriers,
        q_consumed_barriers=plgpu.Barrier(num_barriers=Q_STAGES * spec.warpgroups),
        q_barriers=plgpu.Barrier(num_barriers=Q_STAGES * spec.warpgroups),
        v_consumed_barriers=consumed,
        v_barriers=barriers,
    )
