"""append_decode in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_decode.launch import queries_of
from pallas_kernels.append_decode.mosaic_launch import GROUP, Launch, choose

READERS = 2  # warps that copy keys, and as many that copy values

type Ref = Any
type Array = jax.Array


@dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    dtype: str
    scale: float  # of scores, log2(e) included
    eps: float
    normed: bool
    choice: Launch

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def pages(self) -> int:
        return self.choice.block // self.page_size

    @property
    def half(self) -> int:
        return self.head_dim // 2

    @property
    def layout(self) -> Any:
        """Of halves of a group's heads, [GROUP, H / 2]: a warp has two whole heads."""
        vector = self.half // 32
        tiles = plgpu.Tiling(((GROUP, self.half), (2, self.half), (vector,)))
        return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


class _Arrays(NamedTuple):
    qkv: Ref
    cos: Ref
    sin: Ref
    norms: Ref | None
    k_pages: Ref
    v_pages: Ref
    page_table: Ref
    seq_lens: Ref
    out: Ref


class _Shared(NamedTuple):
    k: Ref
    v: Ref
    q: Ref
    weights: Ref
    plain: Ref
    new_key: Ref
    new_value: Ref
    newest: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    heads_full: Ref


class _Span(NamedTuple):
    row: Array
    kv_head: Array
    length: Array
    last: Array
    blocks: Array


def _span(plan: _Plan, arrays: _Arrays) -> _Span:
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    length = arrays.seq_lens[row]
    last = jnp.maximum(length - 1, 0)
    blocks = lax.div(last + plan.choice.block - 1, jnp.int32(plan.choice.block))
    return _Span(row, kv_head, length, last, blocks)


def _stage(plan: _Plan, block: Array) -> Array:
    return lax.rem(block, jnp.int32(plan.choice.stages))


def _load(plan: _Plan, arrays: _Arrays, shared: _Shared) -> None:
    readers = min(READERS, plan.pages)
    keys = (arrays.k_pages, shared.k, shared.k_full, shared.k_free)
    values = (arrays.v_pages, shared.v, shared.v_full, shared.v_free)

    @plgpu.warp_map
    def _warp(warp: Array) -> None:
        for i, stream in enumerate((keys, values)):
            for share in range(readers):
                copy = partial(_copy_share, plan, arrays, *stream)
                pl.when(warp == i * readers + share)(partial(copy, share, readers))


def _copy_share(
    plan: _Plan, arrays: _Arrays, pool: Ref, room: Ref, full: Ref, free: Ref, share: int, shares: int
) -> None:
    own = range(share, plan.pages, shares)
    stages, row = plan.choice.stages, lax.axis_index("row")
    kv_head = lax.axis_index("kv_head")

    def pages_of(block: Array | int, most: Array | int) -> list[Array]:
        places = (jnp.minimum(block * plan.pages + i, most) for i in own)
        return [arrays.page_table[row, place] for place in places]

    def copy(block: Array | int, pages: list[Array]) -> None:
        stage = _stage(plan, jnp.int32(block))
        for i, page in zip(own, pages, strict=True):
            to = room.at[stage, pl.ds(i * plan.page_size, plan.page_size)]
            source = pool.at[page, pl.ds(0, plan.page_size), kv_head]
            plgpu.copy_gmem_to_smem(source, to, full.at[stage])

    first = [pages_of(block, plan.table_width - 1) for block in range(stages)]
    span = _span(plan, arrays)
    last_page = lax.div(jnp.maximum(span.last - 1, 0), jnp.int32(plan.page_size))
    for block, pages in enumerate(first):
        @pl.when(block < span.blocks)
        def _first(block: int = block, pages: list[Array] = pages) -> None:
            places = [block * plan.pages + i for i in own]
            there = [jnp.where(place <= last_page, page, pages[0]) for place, page in zip(places, pages)]
            copy(block, there)

    @pl.loop(jnp.int32(stages), span.blocks)
    def _next(block: Array) -> None:
        pages = pages_of(block, last_page)
        plgpu.barrier_wait(free.at[_stage(plan, block)])
        copy(block, pages)

    @pl.loop(jnp.maximum(span.blocks - stages, 0), span.blocks)
    def _see_through(block: Array) -> None:
        plgpu.barrier_wait(free.at[_stage(plan, block)])


def _turn(plan: _Plan, first: Array, second: Array, weights: Any, cos: Array, sin: Array):
    shape = (GROUP, plan.half)
    dtype = jnp.dtype(plan.dtype)
    if weights is not None:
        squares = (first * first + second * second).sum(axis=1)
        factor = lax.rsqrt(squares / plan.head_dim + plan.eps)
        factor = lax.broadcast_in_dim(factor, shape, [0])
        first = (first * factor * weights[0]).astype(dtype).astype(jnp.float32)
        second = (second * factor * weights[1]).astype(dtype).astype(jnp.float32)
    return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)


def _prepare(plan: _Plan, arrays: _Arrays, span: _Span, shared: _Shared) -> None:
    h, half, layout = plan.head_dim, plan.half, plan.layout
    shape = (GROUP, half)
    halves = (pl.ds(0, half), pl.ds(half, half))
    key_head = plan.num_heads + span.kv_head

    def along(ref: Ref) -> Array:
        line = plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(line, shape, [1])

    cos, sin = along(arrays.cos.at[span.row]), along(arrays.sin.at[span.row])
    key = [along(arrays.qkv.at[span.row, key_head, x]) for x in halves]
    weights = [None, None]
    if arrays.norms is not None:
        weights = [[along(arrays.norms.at[i, x]) for x in halves] for i in range(2)]
    plgpu.barrier_wait(shared.heads_full)
    query = [
        plgpu.load(shared.plain.at[:, x], layout=layout, optimized=False).astype(jnp.float32)
        for x in halves
    ]
    query = _turn(plan, *query, weights[0], cos, sin)
    key = _turn(plan, *key, weights[1], cos, sin)
    score = jnp.zeros((), jnp.float32)
    for i, x in enumerate(halves):
        shared.q[:, x] = query[i]
        shared.new_key[:, x] = key[i]
    score = (query[0].astype(jnp.float32) * key[0].astype(jnp.float32)).sum(axis=1)
    score += (query[1].astype(jnp.float32) * key[1].astype(jnp.float32)).sum(axis=1)
    shared.newest[...] = score * plan.scale
    plgpu.commit_smem()


def _append(plan: _Plan, arrays: _Arrays, span: _Span, shared: _Shared) -> None:
    @pl.when(span.length > 0)
    def _store() -> None:
        page = arrays.page_table[span.row, lax.div(span.last, jnp.int32(plan.page_size))]
        slot = pl.ds(lax.rem(span.last, jnp.int32(plan.page_size)), 1)
        one = pl.ds(0, 1)
        plgpu.copy_smem_to_gmem(shared.new_key.at[one], arrays.k_pages.at[page, slot, span.kv_head])
        plgpu.copy_smem_to_gmem(shared.new_value.at[one], arrays.v_pages.at[page, slot, span.kv_head])


def _clear_unwritten(plan: _Plan, v: Ref, left: Array) -> None:
    @pl.when(left < plan.choice.block)
    def _clear() -> None:
        for start in range(0, plan.choice.block, 64):
            part = v.at[pl.ds(start, 64)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            at = plgpu.broadcasted_iota(jnp.int32, (64, plan.head_dim), 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(at + start < left, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def _attend(plan: _Plan, span: _Span, sums, shared: _Shared):
    block_keys, h = plan.choice.block, plan.head_dim
    shape = (block_keys, GROUP)
    dtype = jnp.dtype(plan.dtype)

    def multiply(m: int, a: Ref, b: Ref) -> Array:
        def inner(acc: Ref) -> Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]
        return pl.run_scoped(inner, plgpu.WGMMAAccumulatorRef((m, GROUP), jnp.float32))

    def step(block: Array, sums):
        top, totals, acc = sums
        stage = _stage(plan, block)
        left = span.last - block * block_keys
        plgpu.barrier_wait(shared.k_full.at[stage])
        scores = multiply(block_keys, shared.k.at[stage], shared.q.transpose((1, 0)))
        plgpu.barrier_arrive(shared.k_free.at[stage])
        at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        scores = jnp.where(at < left, scores * plan.scale, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=0))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, shape, [1]))
        totals = totals * lax.broadcast_in_dim(shrink, shape, [1]) + weights
        narrow = plgpu.layout_cast(weights.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        shared.weights.transpose((1, 0))[...] = narrow
        plgpu.commit_smem()
        plgpu.barrier_wait(shared.v_full.at[stage])
        _clear_unwritten(plan, shared.v.at[stage], left)
        mix = multiply(h, shared.v.at[stage].transpose((1, 0)), shared.weights.transpose((1, 0)))
        plgpu.barrier_arrive(shared.v_free.at[stage])
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + mix
        return new_top, totals, acc

    return lax.fori_loop(jnp.int32(0), span.blocks, step, sums)


def _work(plan: _Plan, arrays: _Arrays, shared: _Shared) -> None:
    h, block = plan.head_dim, plan.choice.block
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    heads = pl.ds(kv_head * plan.group, GROUP)
    plgpu.copy_gmem_to_smem(arrays.qkv.at[row, heads], shared.plain, shared.heads_full)
    value_head = pl.ds(plan.num_heads + plan.num_kv_heads + kv_head, 1)
    plgpu.copy_gmem_to_smem(arrays.qkv.at[row, value_head], shared.new_value, shared.heads_full)
    span = _span(plan, arrays)
    _prepare(plan, arrays, span, shared)
    _append(plan, arrays, span, shared)
    layout = plgpu.Layout.WGMMA
    top = plgpu.load(shared.newest, layout=layout.reduce(0), optimized=False)
    value = plgpu.load(shared.new_value.at[0], layout=layout.reduce(1), optimized=False)
    acc = lax.broadcast_in_dim(value.astype(jnp.float32), (h, GROUP), [0])
    totals = plgpu.layout_cast(jnp.zeros((block, GROUP), jnp.float32), layout)
    top, totals, acc = _attend(plan, span, (top, totals, acc), shared)
    newest = plgpu.load(shared.newest, layout=layout.reduce(0), optimized=False)
    total = totals.sum(axis=0) + jnp.exp2(newest - top)
    result = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [1])
    is_row = lax.broadcast_in_dim(span.length > 0, result.shape, [])
    result = jnp.where(is_row, result, 0.0)
    result = plgpu.layout_cast(result.astype(arrays.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    shared.plain.transpose((1, 0))[...] = result
    plgpu.commit_smem()
    to = arrays.out.at[row, pl.ds(kv_head * plan.group, plan.group)]
    plgpu.copy_smem_to_gmem(shared.plain.at[pl.ds(0, plan.group)], to)
    plgpu.wait_smem_to_gmem(0)


def _kernel(plan: _Plan, arrays: _Arrays, shared: _Shared) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _loader() -> None:
        _load(plan, arrays, shared)

    @pl.when(warpgroup == 0)
    def _worker() -> None:
        _work(plan, arrays, shared)


def _shared_types(plan: _Plan) -> _Shared:
    choice, dtype, h = plan.choice, jnp.dtype(plan.dtype), plan.head_dim
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    blocks = (choice.stages, choice.block, h)
    pages = plgpu.Barrier(num_arrivals=plan.pages, num_barriers=choice.stages)
    free = plgpu.Barrier(num_barriers=choice.stages)
    return _Shared(
        k=plgpu.SMEM(blocks, dtype, transforms=swizzled),
        v=plgpu.SMEM(blocks, dtype, transforms=swizzled),
        q=plgpu.SMEM((GROUP, h), dtype, transforms=swizzled),
        weights=plgpu.SMEM((GROUP, choice.block), dtype, transforms=swizzled),
        plain=plgpu.SMEM((GROUP, h), dtype),
        new_key=plgpu.SMEM((GROUP, h), dtype),
        new_value=plgpu.SMEM((1, h), dtype),
        newest=plgpu.SMEM((GROUP,), jnp.float32),
        k_full=pages,
        v_full=pages,
        k_free=free,
        v_free=free,
        heads_full=plgpu.Barrier(num_arrivals=2),
    )


def append_decode(
    qkv, cos, sin, qk_norms, k_pages, v_pages, page_table, seq_lens, arrivals=None,
    *, scale: float, eps: float, window: int | None = None,
):
    """See ``append_decode.api``."""
    choice = choose(qkv, k_pages, page_table)
    return launched(choice, qkv, cos, sin, qk_norms, k_pages, v_pages, page_table, seq_lens, arrivals,
                    scale=scale, eps=eps, window=window)


def launched(
    choice: Launch, qkv, cos, sin, qk_norms, k_pages, v_pages, page_table, seq_lens, arrivals=None,
    *, scale: float, eps: float, window: int | None = None,
):
    """``append_decode`` cut up as ``choice`` says; for it and for the tuner."""
    del arrivals
    (b, n, h), (page_size, num_kv_heads) = queries_of(qkv, k_pages).shape, k_pages.shape[1:3]
    plan = _Plan(n, num_kv_heads, h, page_size, page_table.shape[1], str(qkv.dtype),
                 scale * math.log2(math.e), eps, qk_norms is not None, choice)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    norms = [] if qk_norms is None else [qk_norms]

    def body(*refs: Ref, **scratch: Ref) -> None:
        qkv, cos, sin, *norm, k_pages, v_pages, page_table, seq_lens, out = refs
        arrays = _Arrays(qkv, cos, sin, norm[0] if norm else None, k_pages, v_pages, page_table,
                         seq_lens, out)
        _kernel(plan, arrays, _Shared(**scratch))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, n, h), qkv.dtype),
        scratch_types=_shared_types(plan)._asdict(),
        grid=(b, num_kv_heads),
        grid_names=("row", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="append_decode",
    )(qkv, cos, sin, *norms, k_ref, v_ref, page_table, seq_lens)
    return out, jax.freeze(k_ref), jax.freeze(v_ref)
