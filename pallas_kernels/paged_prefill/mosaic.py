"""paged_prefill in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A persistent kernel: one CTA per SM, which computes one tile after the other, the longest first
(``mosaic_plan``). Two CTAs form a cluster if a kv head has query heads for both: each loads half of
every page, and TMA multicasts it to both. Four warps of a CTA's memory warpgroup copy queries and
pages by TMA, two of them keys and two values, blocks ahead of the compute warpgroups and across the
borders of tiles. Each of the two or three compute warpgroups attends for 64 queries of one head: it
issues Q @ K of a block, then P @ V of the previous block, and computes the softmax of the new
scores while the latter runs. All use the same keys: heads of one kv head over the same tokens, or,
if its query heads are no multiple of the warpgroups, one head over consecutive tokens. The method
is that of FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608), without its ping-pong scheduling.
Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.page_streams import PagedOperand, PageStream, for_each_stream
from pallas_kernels.paged_prefill.launch import (
    BLOCK,
    MMA_QUERIES,
    STAGES,
    TOKEN_ALIGNMENT,
    num_warpgroups,
)
from pallas_kernels.paged_prefill.mosaic_plan import (
    Q_STAGES,
    GmemRefs,
    PrefillScratch,
    PrefillSpec,
    Ref,
    Tile,
    for_each_tile,
    query_stage,
    scratch_types,
    stage_index,
    tile_table,
    warpgroup_offsets,
)
from pallas_kernels.paged_prefill.ref import PrefillArgs

# Of a thread of a compute warpgroup and of one that copies, by the number of compute warpgroups:
# 504 and 512 of the 512 that an SM has for them.
REGISTERS: Mapping[int, tuple[int, int]] = MappingProxyType({2: (232, 40), 3: (160, 32)})
PARTIAL_COPIES = (32, 16, 8, 4, 2, 1)  # queries per copy where a tile is not full
LOG2_E = math.log2(math.e)
FOLD = 8  # columns of which each thread has two, in each of two rows


class SoftmaxState(NamedTuple):
    """Online-softmax state of a compute warpgroup. ``acc`` lacks ``p`` @ V of the last block."""

    acc: jax.Array  # float32[MMA_QUERIES, H]
    m_i: jax.Array  # float32[MMA_QUERIES]
    l_i: jax.Array  # float32[MMA_QUERIES, FOLD]: partial sums
    p: jax.Array  # [MMA_QUERIES, BLOCK] in the dtype of the values


def _memory_warpgroup(spec: PrefillSpec, gmem: GmemRefs, scratch: PrefillScratch) -> None:
    """Copy queries and blocks as their stages are consumed, each warp its share."""
    keys = PagedOperand(
        gmem.k_pages, scratch.k_smem, scratch.k_barriers, scratch.k_consumed_barriers
    )
    values = PagedOperand(
        gmem.v_pages, scratch.v_smem, scratch.v_barriers, scratch.v_consumed_barriers
    )
    copy = partial(_copy_tiles, spec, gmem, scratch)
    for_each_stream(keys, values, spec.pages_per_block, copy)


def _copy_tiles(
    spec: PrefillSpec, gmem: GmemRefs, scratch: PrefillScratch, stream: PageStream
) -> None:
    """One warp's copies for all tiles of the CTA. The first warp, which copies keys, also copies
    queries, so a wait for a free query stage delays keys but not values.
    """

    def copy(tile: Tile) -> None:
        if stream.is_first:
            has_keys = tile.first_block < tile.end_block
            pl.when(has_keys)(partial(_copy_queries, spec, gmem, scratch, tile))
        _copy_blocks(spec, gmem, stream, tile)

    tiles_with_keys, blocks = for_each_tile(spec, gmem, copy)

    # A CTA must not exit while a barrier has a phase that was not waited for.
    @pl.loop(jnp.maximum(blocks - STAGES, 0), blocks)
    def _drain(block: jax.Array) -> None:
        stage = lax.rem(block, jnp.int32(STAGES))
        plgpu.barrier_wait(stream.operand.consumed_barriers.at[stage])

    if stream.is_first:

        @pl.loop(jnp.maximum(tiles_with_keys - Q_STAGES, 0), tiles_with_keys)
        def _drain_queries(index: jax.Array) -> None:
            for warpgroup in range(spec.warpgroups):
                barrier = query_stage(spec, index, warpgroup)[1]
                plgpu.barrier_wait(scratch.q_consumed_barriers.at[barrier])


def _copy_queries(spec: PrefillSpec, gmem: GmemRefs, scratch: PrefillScratch, tile: Tile) -> None:
    """Copy each compute warpgroup's queries once it has consumed the stage's previous ones."""
    for warpgroup in range(spec.warpgroups):
        head, offset = warpgroup_offsets(spec, warpgroup)
        source = gmem.q.at[pl.ds(tile.token + offset, MMA_QUERIES), tile.head + head]
        stage, i = query_stage(spec, tile.index, warpgroup)
        consumed = scratch.q_consumed_barriers.at[i]
        pl.when(tile.index >= Q_STAGES)(partial(plgpu.barrier_wait, consumed))
        target, barrier = scratch.q_smem.at[stage, warpgroup], scratch.q_barriers.at[i]
        plgpu.copy_gmem_to_smem(source, target, barrier)


def _copy_blocks(spec: PrefillSpec, gmem: GmemRefs, stream: PageStream, tile: Tile) -> None:
    """A warp's share of a tile's blocks."""
    last_page = lax.div(jnp.maximum(tile.end - 1, 0), jnp.int32(spec.page_size))
    kv_head = lax.div(tile.head, jnp.int32(spec.group))
    operand = stream.operand

    def read_pages(block: jax.Array | int) -> tuple[jax.Array, ...]:
        # Entries past the row's pages may be junk: the row's last page replaces them.
        columns = (
            jnp.minimum(block * spec.pages_per_block + i, last_page) for i in stream.page_indices
        )
        return tuple(gmem.page_table[tile.row, column] for column in columns)

    def copy(block: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = stage_index(tile, block)
        is_reused = tile.blocks_before + block - tile.first_block >= STAGES
        next_pages = read_pages(block + 1)  # in flight while this block waits for a free stage
        pl.when(is_reused)(lambda: plgpu.barrier_wait(operand.consumed_barriers.at[stage]))
        for i, page in zip(stream.page_indices, pages, strict=True):
            target = operand.smem.at[stage, pl.ds(i * spec.page_size, spec.page_size)]
            source = operand.pool.at[page, pl.ds(0, spec.page_size), kv_head]
            barrier = operand.barriers.at[stage]
            plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=spec.multicast_axis)
        return next_pages

    lax.fori_loop(tile.first_block, tile.end_block, copy, read_pages(tile.first_block))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _zeros(shape: tuple[int, ...], layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def _zero_unwritten(spec: PrefillSpec, v_smem: Ref, num_written: jax.Array) -> None:  # [BLOCK, H]
    """Zero all but the first ``num_written`` values, since 0 * NaN is NaN.

    All compute warpgroups do so without synchronisation, as all write the same.
    """

    @pl.when(num_written < BLOCK)
    def _zero() -> None:
        for start in range(0, BLOCK, MMA_QUERIES):
            rows = v_smem.at[pl.ds(start, MMA_QUERIES)]
            values = plgpu.load(rows, layout=plgpu.Layout.WGMMA)
            is_written = _iota((MMA_QUERIES, spec.head_dim), 0) + start < num_written
            rows[...] = jnp.where(is_written, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _fold(
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,  # [MMA_QUERIES, BLOCK]
) -> jax.Array:  # [MMA_QUERIES, FOLD]
    """Reduce columns within each thread in four independent chains. In one chain of 32 values each
    operation would wait for the previous one (7 % of the kernel's time at 16,384 keys on an H200).
    """
    return reduce(combine, (x[:, start : start + FOLD] for start in range(0, BLOCK, FOLD)))


def _accumulate(
    acc: jax.Array,  # float32[MMA_QUERIES, H]
    p: jax.Array,  # [MMA_QUERIES, BLOCK]
    v_smem: Ref,  # [BLOCK, H]
    init: tuple[jax.Array, ...] = (),
    overlapped: Callable[[], tuple[jax.Array, ...]] = tuple,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # float32[MMA_QUERIES, H]
    """``acc`` + ``p`` @ V, and the results of ``overlapped``, which runs during the wgmma.

    ``init`` has the shapes of those results. JAX's interpreter has no wgmma with ``p`` in
    registers.
    """

    def multiply(refs: Any) -> None:
        plgpu.wgmma(refs[0], p, v_smem)
        for ref, result in zip(refs[1], overlapped(), strict=True):
            ref[...] = result

    init_acc: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(multiply)((init_acc, init))


@dataclass(frozen=True)
class _WarpgroupTile:
    """One compute warpgroup's part of a tile."""

    spec: PrefillSpec
    tile: Tile
    warpgroup: jax.Array
    position: jax.Array  # of its first query
    sink: jax.Array | None  # float32[]: that of its head, in base 2
    scratch: PrefillScratch

    def wait_for_keys(self, block: jax.Array | int) -> None:
        """Wait for a block of keys, if the tile has it."""

        @pl.when(block < self.tile.end_block)
        def _wait() -> None:
            plgpu.barrier_wait(self.scratch.k_barriers.at[stage_index(self.tile, block)])

    def issue_qk(self, scores: Ref, stage: jax.Array) -> None:
        """Issue the wgmma of queries and keys."""
        q_stage, _ = query_stage(self.spec, self.tile.index, self.warpgroup)
        keys = self.scratch.k_smem.at[stage].transpose((1, 0))
        plgpu.wgmma(scores, self.scratch.q_smem.at[q_stage, self.warpgroup], keys)

    def softmax_step(
        self,
        scores: jax.Array,  # float32[MMA_QUERIES, BLOCK]
        block: jax.Array | int,
        m_i: jax.Array,  # float32[MMA_QUERIES]
        l_i: jax.Array,  # float32[MMA_QUERIES, FOLD]
        masked: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The new m_i and l_i, the factor alpha that rescales ``acc``, and the block's p."""
        spec = self.spec
        if masked:
            shape = (MMA_QUERIES, BLOCK)
            last_key = _iota(shape, 0) + self.position
            key = _iota(shape, 1) + block * BLOCK
            visible = key <= last_key
            if spec.window is not None:
                visible &= key > last_key - spec.window
            scores = jnp.where(visible, scores, -jnp.inf)
        m_ij = jnp.maximum(m_i, _fold(jnp.maximum, scores).max(axis=1) * spec.scale)
        base = m_ij
        if masked and spec.window is not None:
            # A query whose window starts in a later block has m_ij = -inf: -inf - -inf is NaN.
            base = jnp.where(m_ij == -jnp.inf, 0.0, m_ij)
        alpha = jnp.exp2(m_i - base)
        p = jnp.exp2(scores * spec.scale - lax.broadcast_in_dim(base, scores.shape, [0]))
        l_i = l_i * lax.broadcast_in_dim(alpha, l_i.shape, [0])
        l_i += _fold(jnp.add, p)
        return m_ij, l_i, alpha, p

    def first_block(self, m_i: jax.Array, l_i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """m_i, l_i and p after the first block of keys."""
        block, stage = self.tile.first_block, stage_index(self.tile, self.tile.first_block)
        self.wait_for_keys(block)

        def multiply(scores: Ref) -> jax.Array:
            self.issue_qk(scores, stage)
            return scores[...]

        shape = (MMA_QUERIES, BLOCK)
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(self.scratch.k_consumed_barriers.at[stage])
        m_ij, l_i, _, p = self.softmax_step(scores, block, m_i, l_i, masked=True)
        self.wait_for_keys(block + 1)
        return m_ij, l_i, p.astype(self.scratch.v_smem.dtype)

    def next_block(self, masked: bool, block: jax.Array, state: SoftmaxState) -> SoftmaxState:
        """Softmax of a block of keys, overlapped with P @ V of the previous block."""
        scratch, (acc, m_i, l_i, p) = self.scratch, state
        stage, previous = (stage_index(self.tile, b) for b in (block, block - 1))

        def multiply(scores: Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            self.issue_qk(scores, stage)
            plgpu.barrier_wait(scratch.v_barriers.at[previous])

            p_init = _zeros((MMA_QUERIES, BLOCK))

            def softmax_step() -> tuple[jax.Array, ...]:
                # Wait for the scores only: P @ V, which was issued after Q @ K, is in flight.
                values = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                plgpu.barrier_arrive(scratch.k_consumed_barriers.at[stage])
                results = self.softmax_step(values, block, m_i, l_i, masked)
                results = lax.optimization_barrier(results)
                # Without this wait the compiler moves the wait for P @ V before the softmax.
                self.wait_for_keys(block + 1)
                return results

            init = (m_i, l_i, m_i, p_init)
            return _accumulate(acc, p, scratch.v_smem.at[previous], init, softmax_step)

        scores = plgpu.WGMMAAccumulatorRef((MMA_QUERIES, BLOCK), jnp.float32)
        acc, (m_i, l_i, alpha, p) = pl.run_scoped(multiply, scores)
        plgpu.barrier_arrive(scratch.v_consumed_barriers.at[previous])
        acc *= lax.broadcast_in_dim(alpha, acc.shape, [0])
        # Registers that a wgmma reads must not change before it ends.
        p = lax.optimization_barrier(p)
        return SoftmaxState(acc, m_i, l_i, p.astype(scratch.v_smem.dtype))

    def finish(self, state: SoftmaxState) -> jax.Array:  # float32[MMA_QUERIES, H]
        """Add P @ V of the last block and divide by l_i, to which a sink adds its weight."""
        block, scratch = self.tile.end_block - 1, self.scratch
        stage = stage_index(self.tile, block)
        plgpu.barrier_wait(scratch.v_barriers.at[stage])
        _zero_unwritten(self.spec, scratch.v_smem.at[stage], self.tile.end - block * BLOCK)
        acc, _ = _accumulate(state.acc, state.p, scratch.v_smem.at[stage])
        plgpu.barrier_arrive(scratch.v_consumed_barriers.at[stage])
        l_i = state.l_i.sum(axis=1)
        if self.sink is not None:
            l_i += jnp.exp2(self.sink - state.m_i)
        return acc * lax.broadcast_in_dim(1.0 / l_i, acc.shape, [0])

    def attend(self) -> jax.Array:  # float32[MMA_QUERIES, H]
        """Attention over all keys of the tile, which has at least one."""
        tile, shape = self.tile, (MMA_QUERIES, self.spec.head_dim)
        zeros = _zeros((MMA_QUERIES,), plgpu.Layout.WGMMA.reduce(1))
        acc, first = _zeros(shape), self.first_block(zeros - jnp.inf, _zeros((MMA_QUERIES, FOLD)))
        state = SoftmaxState(acc, *first)
        masked, unmasked = (partial(self.next_block, masked) for masked in (True, False))
        second = tile.first_block + 1
        common, diagonal = tile.common_block, tile.diagonal_block
        if self.spec.window is not None:
            state = lax.fori_loop(second, common, masked, state)
        state = lax.fori_loop(jnp.maximum(common, second), diagonal, unmasked, state)
        state = lax.fori_loop(jnp.maximum(diagonal, second), tile.end_block, masked, state)
        return self.finish(state)


def _compute_warpgroup(
    spec: PrefillSpec, gmem: GmemRefs, scratch: PrefillScratch, warpgroup: jax.Array
) -> None:
    """Attention of one compute warpgroup's queries of all tiles of the CTA."""
    head, offset = warpgroup_offsets(spec, warpgroup)

    def compute(tile: Tile) -> None:
        @pl.when(tile.first_block < tile.end_block)
        def _attend() -> None:
            _, i = query_stage(spec, tile.index, warpgroup)
            sink = None
            if gmem.sinks is not None:  # in flight while queries are
                sink = gmem.sinks[tile.head + head].astype(jnp.float32) * LOG2_E
            plgpu.barrier_wait(scratch.q_barriers.at[i])
            part = _WarpgroupTile(spec, tile, warpgroup, tile.position + offset, sink, scratch)
            result = part.attend()
            plgpu.barrier_arrive(scratch.q_consumed_barriers.at[i])
            _store(spec, gmem, scratch, tile, warpgroup, result)

        @pl.when(tile.first_block == tile.end_block)
        def _padding() -> None:
            zeros = _zeros((MMA_QUERIES, spec.head_dim))
            _store(spec, gmem, scratch, tile, warpgroup, zeros)

    for_each_tile(spec, gmem, compute)
    plgpu.wait_smem_to_gmem(0)


def _store(
    spec: PrefillSpec,
    gmem: GmemRefs,
    scratch: PrefillScratch,
    tile: Tile,
    warpgroup: jax.Array,
    results: jax.Array,  # float32[MMA_QUERIES, H]
) -> None:
    """Start to write a compute warpgroup's results; only those of the tile's row."""
    head, offset = warpgroup_offsets(spec, warpgroup)
    plain, swizzled = (view.at[warpgroup] for view in scratch.out_smem)
    token, head = tile.token + offset, tile.head + head
    lead = jnp.maximum(tile.lead - offset, 0)
    count = jnp.clip(tile.count - offset, lead, MMA_QUERIES) - lead
    results = results.astype(gmem.out.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has been read

    @pl.when(count == MMA_QUERIES)
    def _store_all() -> None:
        swizzled[...] = results
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(swizzled, gmem.out.at[pl.ds(token, MMA_QUERIES), head])

    @pl.when(count < MMA_QUERIES)
    def _store_some() -> None:
        plain[...] = results
        plgpu.commit_smem()
        for size in PARTIAL_COPIES:

            @pl.when(count & size != 0)
            def _copy(size: int = size) -> None:
                first = lead + (count & -2 * size)  # larger copies come before
                target = gmem.out.at[pl.ds(token + first, size), head]
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(first, size)], target)


def _kernel(spec: PrefillSpec, gmem: GmemRefs, scratch: PrefillScratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    compute_registers, memory_registers = REGISTERS[spec.warpgroups]

    @pl.when(warpgroup < spec.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        _compute_warpgroup(spec, gmem, scratch, warpgroup)

    @pl.when(warpgroup == spec.warpgroups)
    def _memory() -> None:
        plgpu.set_max_registers(memory_registers, action="decrease")
        _memory_warpgroup(spec, gmem, scratch)


@jax.jit  # one trace, one kernel for all layers
def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    num_tokens = args.q.shape[0]
    q = jnp.pad(args.q, ((0, -num_tokens % TOKEN_ALIGNMENT), (0, 0), (0, 0)))
    (t, n, h), (page_size, num_kv_heads) = q.shape, args.k_pages.shape[1:3]
    group, scale = n // num_kv_heads, args.scale * LOG2_E
    warpgroups = num_warpgroups(h, args.window, num_tokens)
    spec = PrefillSpec(h, page_size, n, group, scale, args.window, warpgroups)
    tiles, num_tiles = tile_table(args.query_start_loc, args.seq_lens, t, spec.tile_tokens)
    spec = replace(spec, num_tiles=tiles.shape[0])

    optional = () if args.sinks is None else (args.sinks,)

    def body(*refs: Ref) -> None:
        q, k_pages, v_pages, page_table, tiles, num_tiles, *sinks, out, scratch = refs
        gmem = GmemRefs(q, k_pages, v_pages, page_table, tiles, num_tiles, out, *sinks)
        _kernel(spec, gmem, scratch)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(scratch_types(spec, q.dtype),),
        grid=(spec.clusters,),
        grid_names=("cluster",),
        cluster=(spec.cluster,),
        cluster_names=("rank",),
        num_threads=spec.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_prefill",
    )(q, args.k_pages, args.v_pages, args.page_table, tiles, num_tiles, *optional)
    return out[:num_tokens]
