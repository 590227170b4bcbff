"""append_decode in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

A program has two warpgroups. Four warps of one ask for pages by TMA, two of them for keys and two
for values, as many blocks ahead as there is room. They read page ids before they know how long the
row is, so that the first pages are asked for after one wait for memory, not two. Meanwhile the
other warpgroup turns the queries of one kv head, and then attends. The product is turned around, as
in ``skinny_gemm``: 64 keys, or 64 components of values, are what the matrix units always take at
once, and query heads, of which they take any multiple of 8, the other side. So keys and values go
from memory to shared memory to the units without passing through registers. Softmax runs in base 2,
sums in float32.

Where rows and kv heads are more than programs fit at once, a program takes several in turn. Its
loader is then ahead of the other warpgroup across their borders, so that memory never idles.

Programs that share a row and a kv head take its blocks in turn and are a cluster: the first of them
reads what the others found from their shared memory, always in the same order. The last of them,
which has the fewest blocks, also turns and appends the new key, and begins with its score and the
new value, so that nobody waits for them to reach memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_decode.launch import queries_of
from pallas_kernels.append_decode.mosaic_launch import GROUP, KEYS, Launch, choose
from pallas_kernels.append_decode.mosaic_plan import (
    Arrays,
    Plan,
    Ref,
    Shared,
    Span,
    place_of,
    shared_types,
    span_of,
    stage_of,
    turns_of,
)
from pallas_kernels.page_streams import Pages, Stream, copied_by_warps
from pallas_kernels.pdl import await_kernel_before, let_next_begin

LOADER = 1  # the warpgroup that copies
# What a maximum over keys takes: two heads of each thread. Twice as much, the default, would leave
# two programs with splits 224 bytes short of room on a multiprocessor.
REDUCTION_BYTES = 2 * 128 * 4

type _Halves = tuple[jax.Array, jax.Array]  # of heads: [GROUP, H / 2] each


class _Sums(NamedTuple):
    """What a program has found so far."""

    top: jax.Array  # float32[GROUP]: largest score
    weights: jax.Array  # float32[block, GROUP]: by place in a block; the total is their sum
    mixed: jax.Array  # float32[H, GROUP]: values times weights


def _load(plan: Plan, arrays: Arrays, shared: Shared) -> None:
    """Copy blocks as room becomes free, for all that the program attends to."""
    keys = Pages(arrays.k_pages, shared.k, shared.k_full, shared.k_free)
    values = Pages(arrays.v_pages, shared.v, shared.v_full, shared.v_free)
    copied_by_warps(keys, values, plan.pages, partial(_copy_all, plan, arrays))


def _copy_all(plan: Plan, arrays: Arrays, stream: Stream) -> None:
    copy = partial(_copy_span, plan, arrays, stream)
    steps = lax.fori_loop(jnp.int32(0), turns_of(plan), copy, jnp.int32(0))

    @pl.loop(jnp.maximum(steps - plan.choice.stages, 0), steps)
    def _see_through(step: jax.Array) -> None:  # a barrier left early is an error
        plgpu.barrier_wait(stream.pages.free.at[stage_of(plan, step)])


def _copy_span(
    plan: Plan, arrays: Arrays, stream: Stream, turn: jax.Array, before: jax.Array
) -> jax.Array:
    """The steps until after the span."""
    row, _, split = place = place_of(plan, turn)
    stages = plan.choice.stages

    def places_of(step: jax.Array | int) -> list[jax.Array]:
        first = (step * plan.choice.splits + split) * plan.pages
        return [first + i for i in stream.own]

    def pages_at(places: list[jax.Array], most: jax.Array | int) -> list[jax.Array]:
        return [arrays.page_table[row, jnp.minimum(place, most)] for place in places]

    early = [pages_at(places_of(step), plan.table_width - 1) for step in range(stages)]
    # The compiler would read some of them only when the length has come.
    length, early = lax.optimization_barrier((arrays.seq_lens[row], early))
    span = span_of(plan, place, length, before)
    last = lax.div(jnp.maximum(span.last - 1, 0), jnp.int32(plan.page_size))
    copy = partial(_copy_block, plan, span, stream)
    for step, pages in enumerate(early):
        # Page 0, which is no row's, stands in for what may be junk.
        places = zip(places_of(step), pages, strict=True)
        there = [jnp.where(place <= last, page, 0) for place, page in places]
        pl.when(step < span.steps)(partial(copy, step, there))

    @pl.loop(jnp.int32(stages), span.steps)
    def _step(step: jax.Array) -> None:
        copy(step, pages_at(places_of(step), last))  # the last page stands in

    return before + span.steps


def _copy_block(
    plan: Plan, span: Span, stream: Stream, step: jax.Array | int, pages: list[jax.Array]
) -> None:
    stage = stage_of(plan, span.before + step)
    occupied = span.before + step >= plan.choice.stages
    pl.when(occupied)(lambda: plgpu.barrier_wait(stream.pages.free.at[stage]))
    for i, page in zip(stream.own, pages, strict=True):
        to = stream.pages.room.at[stage, pl.ds(i * plan.page_size, plan.page_size)]
        source = stream.pages.pool.at[page, pl.ds(0, plan.page_size), span.kv_head]
        plgpu.copy_gmem_to_smem(source, to, stream.pages.full.at[stage])


def _along(plan: Plan, line: Ref) -> jax.Array:  # [H / 2] -> float32[GROUP, H / 2]
    """The same for each head."""
    values = plgpu.load(line, layout=plan.layout.reduce(0), optimized=False)
    shape = (GROUP, plan.head_dim // 2)
    return lax.broadcast_in_dim(values.astype(jnp.float32), shape, [1])


def _halves_along(plan: Plan, line: Ref) -> _Halves:  # [H]
    first, second = (_along(plan, line.at[x]) for x in plan.halves)
    return first, second


def _normed(plan: Plan, heads: _Halves, weights: _Halves) -> _Halves:
    """Heads over their root mean square, times weights, rounded to the dtype."""
    first, second = heads
    squares = (first * first + second * second).sum(axis=1)
    factor = lax.rsqrt(squares / plan.head_dim + plan.eps)
    factor = lax.broadcast_in_dim(factor, first.shape, [0])
    first, second = first * factor * weights[0], second * factor * weights[1]
    first, second = first.astype(plan.dtype), second.astype(plan.dtype)
    return first.astype(jnp.float32), second.astype(jnp.float32)


def _read_queries(plan: Plan, shared: Shared) -> _Halves:
    first, second = (
        plgpu.load(shared.heads.at[:, x], layout=plan.layout, optimized=False) for x in plan.halves
    )
    return first.astype(jnp.float32), second.astype(jnp.float32)


def _prepare(plan: Plan, arrays: Arrays, span: Span, shared: Shared) -> None:
    """Norm and rope of the queries and of the new key, and its scores."""
    key = _halves_along(plan, arrays.qkv.at[span.row, plan.num_heads + span.kv_head])
    weights = angles = None
    if arrays.qk_norms is not None:
        weights = [_halves_along(plan, arrays.qk_norms.at[i]) for i in range(2)]
    if arrays.cos is not None and arrays.sin is not None:
        angles = _along(plan, arrays.cos.at[span.row]), _along(plan, arrays.sin.at[span.row])
    plgpu.barrier_wait(shared.heads_full)
    turned: list[_Halves] = []
    for i, (x, y) in enumerate((_read_queries(plan, shared), key)):
        if weights is not None:
            x, y = _normed(plan, (x, y), weights[i])
        if angles is not None:
            cos, sin = angles
            x, y = x * cos - y * sin, y * cos + x * sin
        turned.append((x.astype(plan.dtype), y.astype(plan.dtype)))
    score = jnp.zeros((), jnp.float32)
    for at, x, y in zip(plan.halves, *turned, strict=True):
        shared.heads[:, at] = x
        shared.key.at[0, at][...] = y.astype(jnp.float32).max(axis=0).astype(plan.dtype)
        score = score + (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=1)
    shared.score[...] = score * plan.scale
    # A half may be narrower than what is swizzled together.
    shared.q[...] = plgpu.load(shared.heads, layout=plan.layout, optimized=False)
    plgpu.commit_smem()


def _append(plan: Plan, arrays: Arrays, span: Span, shared: Shared) -> None:
    """Begin to write the new key and value to their slot, if this program is the last of a row.

    Whether the slot's old or new bytes are in a page that is copied meanwhile depends on the time;
    neither is looked at.
    """

    @pl.when((span.length > 0) & (span.split == plan.choice.splits - 1))
    def _store() -> None:
        page_size = jnp.int32(plan.page_size)
        page = arrays.page_table[span.row, lax.div(span.last, page_size)]
        slot = (page, pl.ds(lax.rem(span.last, page_size), 1), span.kv_head)
        plgpu.copy_smem_to_gmem(shared.key, arrays.k_pages.at[slot])
        plgpu.copy_smem_to_gmem(shared.value, arrays.v_pages.at[slot])


def _if_last(plan: Plan, span: Span, x: jax.Array, otherwise: float) -> jax.Array:
    """The value in the program that has the new token, else a constant."""
    if plan.choice.splits == 1:
        return x
    is_last = lax.broadcast_in_dim(span.split == plan.choice.splits - 1, x.shape, [])
    return jnp.where(is_last, x, otherwise)


def _begin(plan: Plan, span: Span, shared: Shared) -> _Sums:
    """The new token's score and value, whose weight is not among the weights."""
    wgmma = plgpu.Layout.WGMMA
    value = plgpu.load(shared.value.at[0], layout=wgmma.reduce(1), optimized=False)
    mixed = lax.broadcast_in_dim(value.astype(jnp.float32), (plan.head_dim, GROUP), [0])
    weights = jnp.zeros((plan.choice.block, GROUP), jnp.float32)
    return _Sums(
        _new_score(plan, span, shared),
        plgpu.layout_cast(weights, wgmma),
        _if_last(plan, span, mixed, 0.0),
    )


def _new_score(plan: Plan, span: Span, shared: Shared) -> jax.Array:  # float32[GROUP]
    score = plgpu.load(shared.score, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return _if_last(plan, span, score, -jnp.inf)


def _rows(shape: tuple[int, int]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def _product(a: Ref, b: Ref) -> jax.Array:  # [M, I], [I, GROUP] -> float32[M, GROUP]
    def multiply(total: Ref) -> jax.Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], GROUP), jnp.float32))


def _clear_unwritten(plan: Plan, v: Ref, left: jax.Array) -> None:  # [block, H]
    """Zero all but the first ``left`` values: a weight of 0 does not silence NaN."""

    @pl.when(left < plan.choice.block)
    def _clear() -> None:
        for start in range(0, plan.choice.block, KEYS):
            part = v.at[pl.ds(start, KEYS)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            written = _rows((KEYS, plan.head_dim)) + start < left
            part[...] = jnp.where(written, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _attend(plan: Plan, span: Span, shared: Shared, step: jax.Array, sums: _Sums) -> _Sums:
    """One block more."""
    block, stage = plan.choice.block, stage_of(plan, span.before + step)
    left = span.last - (step * plan.choice.splits + span.split) * block
    shape = (block, GROUP)
    plgpu.barrier_wait(shared.k_full.at[stage])
    scores = _product(shared.k.at[stage], shared.q.transpose((1, 0)))
    plgpu.barrier_arrive(shared.k_free.at[stage])
    scores = jnp.where(_rows(shape) < left, scores * plan.scale, -jnp.inf)
    top = jnp.maximum(sums.top, scores.max(axis=0))  # the first key of a block is always seen
    shrink = jnp.exp2(sums.top - top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, shape, [1]))
    # Two keys of a head side by side in a register's pair, instead of two heads.
    narrow = plgpu.layout_cast(weights.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    shared.weights.transpose((1, 0))[...] = narrow
    plgpu.commit_smem()
    plgpu.barrier_wait(shared.v_full.at[stage])
    _clear_unwritten(plan, shared.v.at[stage], left)
    mixed = _product(shared.v.at[stage].transpose((1, 0)), shared.weights.transpose((1, 0)))
    plgpu.barrier_arrive(shared.v_free.at[stage])
    weights += sums.weights * lax.broadcast_in_dim(shrink, shape, [1])
    mixed += sums.mixed * lax.broadcast_in_dim(shrink, mixed.shape, [1])
    return _Sums(top, weights, mixed)


def _leave(shared: Shared, top: jax.Array, total: jax.Array, mixed: jax.Array) -> None:
    """Show what a split found to its cluster."""
    for ref, found in ((shared.top, top), (shared.total, total), (shared.mixed, mixed)):
        ref[...] = found
    plgpu.barrier_arrive(shared.cluster)
    plgpu.barrier_wait(shared.cluster)


def _found(shared: Shared, split: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a split of the cluster left: top, total, mixed. JAX's interpreter cannot look there."""
    wgmma = plgpu.Layout.WGMMA
    parts = ((shared.top, wgmma.reduce(0)), (shared.total, wgmma.reduce(0)), (shared.mixed, wgmma))
    top, total, mixed = (
        plgpu.load(plgpu.cluster_ref(ref, {"split": split}), layout=layout, optimized=False)
        for ref, layout in parts
    )
    return top, total, mixed


def _combined(plan: Plan, shared: Shared) -> tuple[jax.Array, jax.Array]:
    """Total weights and mixed values of all splits."""
    parts = [_found(shared, split) for split in range(plan.choice.splits)]
    highest = parts[0][0]
    for top, _, _ in parts[1:]:
        highest = jnp.maximum(highest, top)
    total = mixed = jnp.zeros((), jnp.float32)
    for top, part, values in parts:
        weight = jnp.exp2(top - highest)
        total = total + part * weight
        mixed = mixed + values * lax.broadcast_in_dim(weight, values.shape, [1])
    return total, mixed


def _finish(
    plan: Plan,
    arrays: Arrays,
    span: Span,
    shared: Shared,
    total: jax.Array,  # float32[GROUP]
    mixed: jax.Array,  # float32[H, GROUP]
) -> None:
    """Write the results of a row and kv head."""
    result = mixed * lax.broadcast_in_dim(1.0 / total, mixed.shape, [1])
    is_row = lax.broadcast_in_dim(span.length > 0, mixed.shape, [])
    result = jnp.where(is_row, result, 0.0).astype(plan.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    shared.heads.transpose((1, 0))[...] = result
    plgpu.commit_smem()
    to = arrays.out.at[span.row, pl.ds(span.kv_head * plan.group, plan.group)]
    plgpu.copy_smem_to_gmem(shared.heads.at[pl.ds(0, plan.group)], to)


def _work(
    plan: Plan, arrays: Arrays, shared: Shared, turn: jax.Array, before: jax.Array
) -> jax.Array:
    """From the heads of a row to its results; the steps until then."""
    row, kv_head, _ = place = place_of(plan, turn)
    # What lies beside the group's heads is computed, too, and not kept.
    for start in range(0, plan.copies * plan.box, plan.box):
        queries = arrays.qkv.at[row, pl.ds(kv_head * plan.group + start, plan.box)]
        room = shared.heads.at[pl.ds(start, plan.box)]
        plgpu.copy_gmem_to_smem(queries, room, shared.heads_full)
    value = arrays.qkv.at[row, pl.ds(plan.num_heads + plan.num_kv_heads + kv_head, 1)]
    plgpu.copy_gmem_to_smem(value, shared.value, shared.heads_full)
    span = span_of(plan, place, arrays.seq_lens[row], before)
    _prepare(plan, arrays, span, shared)
    _append(plan, arrays, span, shared)
    attend = partial(_attend, plan, span, shared)
    sums = lax.fori_loop(jnp.int32(0), span.steps, attend, _begin(plan, span, shared))
    newest = jnp.exp2(_new_score(plan, span, shared) - sums.top)
    total = sums.weights.sum(axis=0) + _if_last(plan, span, newest, 0.0)
    finish = partial(_finish, plan, arrays, span, shared)
    if plan.choice.splits == 1:
        finish(total, sums.mixed)
    else:
        _leave(shared, sums.top, total, sums.mixed)

        @pl.when(span.split == 0)
        def _combine() -> None:
            finish(*_combined(plan, shared))

        # Nobody ends before the first has read what it left.
        plgpu.barrier_arrive(shared.cluster)
        plgpu.barrier_wait(shared.cluster)
    # Shared memory may go once it is read; the writes are done when the kernel is.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return before + span.steps


def _kernel(plan: Plan, arrays: Arrays, shared: Shared) -> None:
    let_next_begin()
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == LOADER)(partial(_load, plan, arrays, shared))

    @pl.when(warpgroup != LOADER)
    def _worker() -> None:
        await_kernel_before()
        work = partial(_work, plan, arrays, shared)
        lax.fori_loop(jnp.int32(0), turns_of(plan), work, jnp.int32(0))


def append_decode(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    static = {"scale": scale, "eps": eps, "window": window}
    choice = choose(qkv, k_pages, page_table)
    turns = (cos, sin, qk_norms)
    return launched(choice, qkv, *turns, k_pages, v_pages, page_table, seq_lens, arrivals, **static)


def launched(
    choice: Launch,
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    *,
    scale: float,
    eps: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """``append_decode`` cut up as ``choice`` says; for it and for the tuner."""
    del arrivals, window  # clusters arrive by themselves; a call with a window does not come here
    (b, n, h), (page_size, num_kv_heads) = queries_of(qkv, k_pages).shape, k_pages.shape[1:3]
    scale *= math.log2(math.e)
    sizes = (n, num_kv_heads, h, page_size, page_table.shape[1])
    plan = Plan(*sizes, qkv.dtype, scale, eps, b * num_kv_heads, choice)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)  # in place
    turns = {"cos": cos, "sin": sin, "qk_norms": qk_norms}
    there = {name: array for name, array in turns.items() if array is not None}

    def body(*refs: Ref, **scratch: Ref) -> None:
        qkv, k_pages, v_pages, page_table, seq_lens, *turning, out = refs
        named = dict.fromkeys(turns) | dict(zip(there, turning, strict=True))
        arrays = Arrays(qkv, k_pages, v_pages, page_table, seq_lens, **named, out=out)
        _kernel(plan, arrays, Shared(**scratch))

    cluster: Any = {}
    if choice.splits > 1:
        cluster = {"cluster": (choice.splits,), "cluster_names": ("split",)}
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, n, h), qkv.dtype),
        scratch_types=shared_types(plan),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        kernel_name="append_decode",
        **cluster,
    )(qkv, k_ref, v_ref, page_table, seq_lens, *there.values())
    return out, jax.freeze(k_ref), jax.freeze(v_ref)
