"""append_decode in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A CTA has a memory and a compute warpgroup. Four warps of the memory warpgroup copy pages by TMA,
two of them keys and two values, as many blocks ahead as there are pipeline stages. Without a window
they read page ids before they know the row's length, so the first copies are issued after one wait
for memory, not two; a window's first page follows from the length. At the same time the compute
warpgroup rotates the queries of one kv head; then it attends. The GEMMs are transposed, as in
``skinny_gemm``: M of a wgmma is always 64, which are keys or components of values, and N is any
multiple of 8, which are query heads. So keys and values go from global to shared memory to the
tensor cores without passing through registers. Softmax is computed in base 2, sums in float32.

If there are more work items, pairs of a row and a kv head, than CTAs fit on the GPU, a CTA computes
several. Its memory warpgroup runs ahead across their borders, so memory does not idle.

CTAs that split a work item take its blocks round-robin and form a cluster: the first CTA reads the
softmax states of the others from their shared memory, always in the same order. The last CTA, which
has the fewest blocks, also rotates and appends the new key. It starts from the new key's score and
the new value in shared memory, so no CTA waits until they are in global memory. A sink adds to the
sum of weights once, when the states of all splits are known.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_decode.mosaic_launch import (
    MMA_HEADS,
    MMA_KEYS,
    WIDE_HEAD,
    MosaicConfig,
    choose_config,
)
from pallas_kernels.append_decode.mosaic_plan import (
    DecodeScratch,
    DecodeSpec,
    GmemRefs,
    Ref,
    WorkItem,
    item_index,
    num_cta_items,
    scratch_types,
    stage_index,
    work_item,
)
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.lib.page_streams import PagedOperand, PageStream, for_each_stream
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents

MEMORY_WARPGROUP = 1
LOG2_E = math.log2(math.e)
WARPGROUP_THREADS = 128
SWIZZLED_COLUMNS = 64  # of a tile of pages in shared memory
# Scratch of a maximum over keys, for up to ``MMA_HEADS`` heads: two of each thread. The default,
# twice as much, would exceed the shared memory of an SM by 224 bytes for two CTAs with splits. The
# maximum over heads of half of a wide head takes twice as much, and so do more heads.
REDUCTION_BYTES = 2 * WARPGROUP_THREADS * 4

type _Halves = tuple[jax.Array, jax.Array]  # of heads: [group_tile, H / 2] each


class SoftmaxState(NamedTuple):
    """Online-softmax state of one CTA."""

    m_i: jax.Array  # float32[group_tile]: largest score
    p: jax.Array  # float32[block, group_tile]: weights by position in a block; l_i is their sum
    acc: jax.Array  # float32[H, group_tile]: sum of weights * values


def _memory_warpgroup(spec: DecodeSpec, gmem: GmemRefs, scratch: DecodeScratch) -> None:
    """Copy the blocks of all work items of the CTA as pipeline stages are consumed."""
    keys = PagedOperand(
        gmem.k_pages, scratch.k_smem, scratch.k_barriers, scratch.k_consumed_barriers
    )
    values = PagedOperand(
        gmem.v_pages, scratch.v_smem, scratch.v_barriers, scratch.v_consumed_barriers
    )
    for_each_stream(keys, values, spec.pages_per_block, partial(_copy_items, spec, gmem))


def _copy_items(spec: DecodeSpec, gmem: GmemRefs, stream: PageStream) -> None:
    copy = partial(_copy_item, spec, gmem, stream)
    steps = lax.fori_loop(jnp.int32(0), num_cta_items(spec), copy, jnp.int32(0))

    # A CTA must not exit while a barrier has a phase that was not waited for.
    @pl.loop(jnp.maximum(steps - spec.config.stages, 0), steps)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(stream.operand.consumed_barriers.at[stage_index(spec, step)])


def _copy_item(
    spec: DecodeSpec, gmem: GmemRefs, stream: PageStream, i: jax.Array, first_step: jax.Array
) -> jax.Array:
    """Copy the CTA's i-th work item; returns the step after it."""
    row, _, split = index = item_index(spec, i)
    stages = spec.config.stages

    def table_columns(step: jax.Array | int, first_page: jax.Array | int) -> list[jax.Array]:
        first = (step * spec.config.splits + split) * spec.pages_per_block
        return [first + (first_page + i) for i in stream.page_indices]

    def read_pages(columns: list[jax.Array], last: jax.Array | int) -> list[jax.Array]:
        return [gmem.page_table[row, jnp.minimum(column, last)] for column in columns]

    def read_prologue(first_page: jax.Array | int) -> list[list[jax.Array]]:
        columns = (table_columns(step, first_page) for step in range(stages))
        return [read_pages(of_step, spec.table_width - 1) for of_step in columns]

    if spec.window is None:
        prologue = read_prologue(0)
        # Without the barrier the compiler moves some of these reads behind the read of the length.
        length, prologue = lax.optimization_barrier((gmem.seq_lens[row], prologue))
        item = work_item(spec, index, length, first_step)
    else:
        item = work_item(spec, index, gmem.seq_lens[row], first_step)
        prologue = read_prologue(item.first_page)
    last = lax.div(jnp.maximum(item.new_position - 1, 0), jnp.int32(spec.page_size))
    copy = partial(_copy_block, spec, item, stream)
    for step, pages in enumerate(prologue):
        # Entries past the row's pages may be junk: page 0, which belongs to no row, replaces them.
        columns = zip(table_columns(step, item.first_page), pages, strict=True)
        valid = [jnp.where(column <= last, page, 0) for column, page in columns]
        pl.when(step < item.num_steps)(partial(copy, step, valid))

    @pl.loop(jnp.int32(stages), item.num_steps)
    def _step(step: jax.Array) -> None:
        columns = table_columns(step, item.first_page)
        copy(step, read_pages(columns, last))  # junk is replaced by the last page

    return first_step + item.num_steps


def _copy_block(
    spec: DecodeSpec,
    item: WorkItem,
    stream: PageStream,
    step: jax.Array | int,
    pages: list[jax.Array],
) -> None:
    stage, operand = stage_index(spec, item.first_step + step), stream.operand
    is_reused = item.first_step + step >= spec.config.stages
    pl.when(is_reused)(lambda: plgpu.barrier_wait(operand.consumed_barriers.at[stage]))
    for i, page in zip(stream.page_indices, pages, strict=True):
        target = operand.smem.at[stage, pl.ds(i * spec.page_size, spec.page_size)]
        source = operand.pool.at[page, pl.ds(0, spec.page_size), item.kv_head]
        plgpu.copy_gmem_to_smem(source, target, operand.barriers.at[stage])


def _broadcast(spec: DecodeSpec, half: Ref) -> jax.Array:  # [H / 2] -> float32[group_tile, H / 2]
    """The same values for each head."""
    values = plgpu.load(half, layout=spec.half_layout.reduce(0), optimized=False)
    shape = (spec.group_tile, spec.head_dim // 2)
    return lax.broadcast_in_dim(values.astype(jnp.float32), shape, [1])


def _broadcast_halves(spec: DecodeSpec, head: Ref) -> _Halves:  # [H]
    first, second = (_broadcast(spec, head.at[half]) for half in spec.halves)
    return first, second


def _rms_norm(spec: DecodeSpec, heads: _Halves, weights: _Halves | None) -> _Halves:
    """Heads over their root mean square, times weights if there are any, rounded to the dtype."""
    first, second = heads
    squares = (first * first + second * second).sum(axis=1)
    factor = lax.rsqrt(squares / spec.head_dim + spec.eps)
    factor = lax.broadcast_in_dim(factor, first.shape, [0])
    first, second = first * factor, second * factor
    if weights is not None:
        first, second = first * weights[0], second * weights[1]
    first, second = first.astype(spec.dtype), second.astype(spec.dtype)
    return first.astype(jnp.float32), second.astype(jnp.float32)


def _norm_value(spec: DecodeSpec, gmem: GmemRefs, item: WorkItem, scratch: DecodeScratch) -> None:
    """Normalise the new value."""
    head = spec.num_heads + spec.num_kv_heads + item.kv_head
    first, second = (
        plgpu.layout_cast(half, spec.half_layout)
        for half in _broadcast_halves(spec, gmem.qkv.at[item.row, head])
    )
    for half, x in zip(spec.halves, _rms_norm(spec, (first, second), None), strict=True):
        scratch.new_v_smem.at[0, half][...] = x.max(axis=0).astype(spec.dtype)


def _load_queries(spec: DecodeSpec, scratch: DecodeScratch) -> _Halves:
    first, second = (
        plgpu.load(scratch.heads_smem.at[:, half], layout=spec.half_layout, optimized=False)
        for half in spec.halves
    )
    return first.astype(jnp.float32), second.astype(jnp.float32)


def _prepare_heads(
    spec: DecodeSpec, gmem: GmemRefs, item: WorkItem, scratch: DecodeScratch
) -> None:
    """Norm and rope of the queries and of the new key, and the new key's scores."""
    if spec.norm_value:
        _norm_value(spec, gmem, item, scratch)
    key = _broadcast_halves(spec, gmem.qkv.at[item.row, spec.num_heads + item.kv_head])
    weights = angles = None
    if gmem.qk_norms is not None:
        weights = [_broadcast_halves(spec, gmem.qk_norms.at[i]) for i in range(2)]
    if gmem.cos is not None and gmem.sin is not None:
        angles = _broadcast(spec, gmem.cos.at[item.row]), _broadcast(spec, gmem.sin.at[item.row])
    plgpu.barrier_wait(scratch.heads_barrier)
    rotated: list[_Halves] = []
    for i, (x, y) in enumerate((_load_queries(spec, scratch), key)):
        if weights is not None:
            x, y = _rms_norm(spec, (x, y), weights[i])
        if angles is not None:
            cos, sin = angles
            x, y = x * cos - y * sin, y * cos + x * sin
        rotated.append((x.astype(spec.dtype), y.astype(spec.dtype)))
    score = jnp.zeros((), jnp.float32)
    for half, q, k in zip(spec.halves, *rotated, strict=True):
        scratch.heads_smem[:, half] = q
        scratch.new_k_smem.at[0, half][...] = k.astype(jnp.float32).max(axis=0).astype(spec.dtype)
        score = score + (q.astype(jnp.float32) * k.astype(jnp.float32)).sum(axis=1)
    scratch.new_score_smem[...] = score * spec.scale
    # Halves are not stored to q_smem directly: a half may be narrower than a swizzled tile.
    scratch.q_smem[...] = plgpu.load(scratch.heads_smem, layout=spec.half_layout, optimized=False)
    plgpu.commit_smem()


def _append_kv(spec: DecodeSpec, gmem: GmemRefs, item: WorkItem, scratch: DecodeScratch) -> None:
    """Start to write the new key and value to their slot, in the last CTA of a row.

    A copy of the same page that is in flight may read the old or the new bytes of the slot; neither
    is used.
    """

    @pl.when((item.length > 0) & (item.split == spec.config.splits - 1))
    def _store() -> None:
        page_size = jnp.int32(spec.page_size)
        page = gmem.page_table[item.row, lax.div(item.new_position, page_size)]
        slot = (page, pl.ds(lax.rem(item.new_position, page_size), 1), item.kv_head)
        plgpu.copy_smem_to_gmem(scratch.new_k_smem, gmem.k_pages.at[slot])
        plgpu.copy_smem_to_gmem(scratch.new_v_smem, gmem.v_pages.at[slot])


def _if_last_split(spec: DecodeSpec, item: WorkItem, x: jax.Array, otherwise: float) -> jax.Array:
    """``x`` in the CTA that has the new token, else a constant."""
    if spec.config.splits == 1:
        return x
    is_last = lax.broadcast_in_dim(item.split == spec.config.splits - 1, x.shape, [])
    return jnp.where(is_last, x, otherwise)


def _initial_state(spec: DecodeSpec, item: WorkItem, scratch: DecodeScratch) -> SoftmaxState:
    """Initialise the state with the new token, which is not in the pages yet. ``p`` leaves out its
    weight.
    """
    wgmma = plgpu.Layout.WGMMA
    value = plgpu.load(scratch.new_v_smem.at[0], layout=wgmma.reduce(1), optimized=False)
    acc = lax.broadcast_in_dim(value.astype(jnp.float32), (spec.head_dim, spec.group_tile), [0])
    p = jnp.zeros((spec.config.block, spec.group_tile), jnp.float32)
    return SoftmaxState(
        _new_score(spec, item, scratch),
        plgpu.layout_cast(p, wgmma),
        _if_last_split(spec, item, acc, 0.0),
    )


def _new_score(
    spec: DecodeSpec, item: WorkItem, scratch: DecodeScratch
) -> jax.Array:  # float32[group_tile]
    layout = plgpu.Layout.WGMMA.reduce(0)
    score = plgpu.load(scratch.new_score_smem, layout=layout, optimized=False)
    return _if_last_split(spec, item, score, -jnp.inf)


def _row_iota(shape: tuple[int, int]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def _matmul(a: Ref, b: Ref) -> jax.Array:  # [M, I], [I, group_tile] -> float32[M, group_tile]
    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _zero_unwritten(spec: DecodeSpec, v_smem: Ref, num_written: jax.Array) -> None:  # [block, H]
    """Zero all but the first ``num_written`` values, since 0 * NaN is NaN.

    With 16 heads a tile at a time: with whole rows of 128 components, two CTAs would not have
    enough registers on an SM (134 of a thread; with tiles 112). With 8 heads they have, and tiles,
    each between two barriers, are slower: 64 rows of Qwen3-4B took 5.32 ms instead of 5.06 (H200).
    """
    columns = SWIZZLED_COLUMNS if spec.group_tile > MMA_HEADS else spec.head_dim
    shape = (MMA_KEYS, columns)

    @pl.when(num_written < spec.config.block)
    def _zero() -> None:
        tiles = product(*(range(0, x, y) for x, y in zip(v_smem.shape, shape, strict=True)))
        for start, column in tiles:
            tile = v_smem.at[pl.ds(start, MMA_KEYS), pl.ds(column, columns)]
            values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            is_written = _row_iota(shape) + start < num_written
            tile[...] = jnp.where(is_written, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _attend_block(
    spec: DecodeSpec, item: WorkItem, scratch: DecodeScratch, step: jax.Array, state: SoftmaxState
) -> SoftmaxState:
    """Update the state with one block of keys and values."""
    block, stage = spec.config.block, stage_index(spec, item.first_step + step)
    before = (step * spec.config.splits + item.split) * block  # keys of the blocks before
    num_keys = item.num_keys - before
    shape = (block, spec.group_tile)
    plgpu.barrier_wait(scratch.k_barriers.at[stage])
    scores = _matmul(scratch.k_smem.at[stage], scratch.q_smem.transpose((1, 0)))
    plgpu.barrier_arrive(scratch.k_consumed_barriers.at[stage])
    visible = _row_iota(shape) < num_keys
    if spec.window is not None:
        visible &= _row_iota(shape) >= item.num_hidden - before
    scores = jnp.where(visible, scores * spec.scale, -jnp.inf)
    m_ij = jnp.maximum(state.m_i, scores.max(axis=0))  # finite: a block has a visible key
    alpha = jnp.exp2(state.m_i - m_ij)
    p = jnp.exp2(scores - lax.broadcast_in_dim(m_ij, shape, [1]))
    # A register holds two adjacent keys of a head instead of two heads.
    p_transposed = plgpu.layout_cast(p.astype(spec.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    scratch.p_smem.transpose((1, 0))[...] = p_transposed
    plgpu.commit_smem()
    plgpu.barrier_wait(scratch.v_barriers.at[stage])
    _zero_unwritten(spec, scratch.v_smem.at[stage], num_keys)
    acc = _matmul(scratch.v_smem.at[stage].transpose((1, 0)), scratch.p_smem.transpose((1, 0)))
    plgpu.barrier_arrive(scratch.v_consumed_barriers.at[stage])
    p += state.p * lax.broadcast_in_dim(alpha, shape, [1])
    acc += state.acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
    return SoftmaxState(m_ij, p, acc)


def _load_sinks(gmem: GmemRefs, kv_head: jax.Array) -> jax.Array | None:  # float32[group_tile]
    """The sinks of a kv head's queries, in base 2."""
    if gmem.sinks is None:
        return None
    layout = plgpu.Layout.WGMMA.reduce(0)
    sinks = plgpu.load(gmem.sinks.at[kv_head], layout=layout, optimized=False)
    return sinks.astype(jnp.float32) * LOG2_E


def _add_sinks(
    l_i: jax.Array,  # float32[group_tile]
    m_i: jax.Array,  # float32[group_tile]
    sinks: jax.Array | None,  # float32[group_tile]
) -> jax.Array:
    """l_i with the weights of sinks. Beside a far larger sink it is infinite, and results are 0."""
    return l_i if sinks is None else l_i + jnp.exp2(sinks - m_i)


def _share_state(scratch: DecodeScratch, m_i: jax.Array, l_i: jax.Array, acc: jax.Array) -> None:
    """Write the CTA's state to its shared memory, and wait until all CTAs of the cluster have."""
    for ref, x in ((scratch.m_smem, m_i), (scratch.l_smem, l_i), (scratch.acc_smem, acc)):
        ref[...] = x
    plgpu.barrier_arrive(scratch.cluster_barrier)
    plgpu.barrier_wait(scratch.cluster_barrier)


def _read_state(scratch: DecodeScratch, split: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m_i, l_i and acc of a split, from its CTA. JAX's interpreter has no access to other CTAs."""
    wgmma = plgpu.Layout.WGMMA
    per_head = wgmma.reduce(0)
    refs = ((scratch.m_smem, per_head), (scratch.l_smem, per_head), (scratch.acc_smem, wgmma))
    m_i, l_i, acc = (
        plgpu.load(plgpu.cluster_ref(ref, {"split": split}), layout=layout, optimized=False)
        for ref, layout in refs
    )
    return m_i, l_i, acc


def _merge_splits(
    spec: DecodeSpec,
    scratch: DecodeScratch,
    sinks: jax.Array | None,  # float32[group_tile]
) -> tuple[jax.Array, jax.Array]:
    """l_i, with the sinks, and acc over all splits."""
    states = [_read_state(scratch, split) for split in range(spec.config.splits)]
    m_max = states[0][0]
    for m_i, _, _ in states[1:]:
        m_max = jnp.maximum(m_max, m_i)
    l_sum = acc_sum = jnp.zeros((), jnp.float32)
    for m_i, l_i, acc in states:
        alpha = jnp.exp2(m_i - m_max)
        l_sum = l_sum + l_i * alpha
        acc_sum = acc_sum + acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
    return _add_sinks(l_sum, m_max, sinks), acc_sum


def _store_output(
    spec: DecodeSpec,
    gmem: GmemRefs,
    item: WorkItem,
    scratch: DecodeScratch,
    l_i: jax.Array,  # float32[group_tile]
    acc: jax.Array,  # float32[H, group_tile]
) -> None:
    """Start to write the results of a row and kv head."""
    result = acc * lax.broadcast_in_dim(1.0 / l_i, acc.shape, [1])
    is_row = lax.broadcast_in_dim(item.length > 0, acc.shape, [])
    result = jnp.where(is_row, result, 0.0).astype(spec.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    scratch.heads_smem.transpose((1, 0))[...] = result
    plgpu.commit_smem()
    target = gmem.out.at[item.row, pl.ds(item.kv_head * spec.group, spec.group)]
    plgpu.copy_smem_to_gmem(scratch.heads_smem.at[pl.ds(0, spec.group)], target)


def _copy_heads(
    spec: DecodeSpec, gmem: GmemRefs, row: jax.Array, kv_head: jax.Array, scratch: DecodeScratch
) -> None:
    """Start to copy the queries of the group, and the new value if it has no norm."""
    # Heads next to the group's are copied and computed too; their results are not stored.
    for start in range(0, spec.num_copies * spec.heads_per_copy, spec.heads_per_copy):
        source = gmem.qkv.at[row, pl.ds(kv_head * spec.group + start, spec.heads_per_copy)]
        target = scratch.heads_smem.at[pl.ds(start, spec.heads_per_copy)]
        plgpu.copy_gmem_to_smem(source, target, scratch.heads_barrier)
    if spec.norm_value:
        return
    value = gmem.qkv.at[row, pl.ds(spec.num_heads + spec.num_kv_heads + kv_head, 1)]
    plgpu.copy_gmem_to_smem(value, scratch.new_v_smem, scratch.heads_barrier)


def _compute_item(
    spec: DecodeSpec, gmem: GmemRefs, scratch: DecodeScratch, i: jax.Array, first_step: jax.Array
) -> jax.Array:
    """Compute the CTA's i-th work item; returns the step after it."""
    row, kv_head, _ = index = item_index(spec, i)
    _copy_heads(spec, gmem, row, kv_head, scratch)
    sinks = _load_sinks(gmem, kv_head)  # in flight while keys are
    item = work_item(spec, index, gmem.seq_lens[row], first_step)
    _prepare_heads(spec, gmem, item, scratch)
    _append_kv(spec, gmem, item, scratch)
    attend = partial(_attend_block, spec, item, scratch)
    initial = _initial_state(spec, item, scratch)
    state = lax.fori_loop(jnp.int32(0), item.num_steps, attend, initial)
    new_p = jnp.exp2(_new_score(spec, item, scratch) - state.m_i)
    l_i = state.p.sum(axis=0) + _if_last_split(spec, item, new_p, 0.0)
    store = partial(_store_output, spec, gmem, item, scratch)
    if spec.config.splits == 1:
        store(_add_sinks(l_i, state.m_i, sinks), state.acc)
    else:
        _share_state(scratch, state.m_i, l_i, state.acc)

        @pl.when(item.split == 0)
        def _merge() -> None:
            store(*_merge_splits(spec, scratch, sinks))

        # Keep the shared state until the first CTA has read it.
        plgpu.barrier_arrive(scratch.cluster_barrier)
        plgpu.barrier_wait(scratch.cluster_barrier)
    # Shared memory may be reused once it is read; the writes complete by the end of the kernel.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return first_step + item.num_steps


def _keep_heads_unswizzled(spec: DecodeSpec, scratch: DecodeScratch) -> None:
    """Fill ``heads_smem`` in a register layout that can be stored only where nothing is swizzled.

    Otherwise Mosaic swizzles it for groups of 1, 3, 5 and 7 heads of 128 components, and a load of
    half a head finds other components than TMA wrote there (jax 0.11.2; wrong on an H200).
    """
    shape = scratch.heads_smem.shape
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.prod(shape) // WARPGROUP_THREADS)
    scratch.heads_smem[...] = plgpu.layout_cast(jnp.zeros(shape, spec.dtype), layout)
    plgpu.commit_smem()


def _kernel(spec: DecodeSpec, gmem: GmemRefs, scratch: DecodeScratch) -> None:
    launch_dependents()
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == MEMORY_WARPGROUP)(partial(_memory_warpgroup, spec, gmem, scratch))

    @pl.when(warpgroup != MEMORY_WARPGROUP)
    def _compute_warpgroup() -> None:
        _keep_heads_unswizzled(spec, scratch)
        grid_dependency_wait()
        compute = partial(_compute_item, spec, gmem, scratch)
        lax.fori_loop(jnp.int32(0), num_cta_items(spec), compute, jnp.int32(0))


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    return launch_with(choose_config(args), args)


def launch_with(
    config: MosaicConfig, args: DecodeArgs
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """``append_decode`` with a given configuration; the tuner calls it too.

    Cluster barriers replace ``arrivals``.
    """
    (b, n, h), (page_size, num_kv_heads) = args.queries.shape, args.k_pages.shape[1:3]
    sizes = (n, num_kv_heads, h, page_size, args.page_table.shape[1])
    norm_value = args.values == "normalised"
    settings = (args.qkv.dtype, args.scale * LOG2_E, args.eps, args.window, norm_value)
    spec = DecodeSpec(*sizes, *settings, b * num_kv_heads, config)
    sinks = args.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, spec.group)
        sinks = jnp.pad(sinks, ((0, 0), (0, spec.group_tile - spec.group)))
    k_ref, v_ref = jax.new_ref(args.k_pages), jax.new_ref(args.v_pages)  # in place
    optional = {"cos": args.cos, "sin": args.sin, "qk_norms": args.qk_norms, "sinks": sinks}
    present = {name: array for name, array in optional.items() if array is not None}

    def body(*refs: Ref) -> None:
        qkv, k_pages, v_pages, page_table, seq_lens, *present_refs, out, scratch = refs
        named = dict.fromkeys(optional) | dict(zip(present, present_refs, strict=True))
        gmem = GmemRefs(qkv, k_pages, v_pages, page_table, seq_lens, **named, out=out)
        _kernel(spec, gmem, scratch)

    large = h == WIDE_HEAD or spec.group_tile > MMA_HEADS
    cluster: Any = {}
    if config.splits > 1:
        cluster = {"cluster": (config.splits,), "cluster_names": ("split",)}
    out = plgpu.kernel(
        body,
        out_type=args.queries,
        scratch_types=(scratch_types(spec),),
        grid=(spec.clusters,),
        grid_names=("cluster",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=REDUCTION_BYTES * (2 if large else 1),
        ),
        kernel_name="append_decode",
        **cluster,
    )(args.qkv, k_ref, v_ref, args.page_table, args.seq_lens, *present.values())
    return out, jax.freeze(k_ref), jax.freeze(v_ref)
