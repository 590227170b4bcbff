"""skinny_gemm in Triton, for NVIDIA GPUs from compute capability 8.0 on.

One program makes a tile of the result, or its sum over one span of the inner axis: so few tokens
leave the matrix units idle, and what counts is that every multiprocessor has weights under way all
the time. The norm needs no pass of its own: weighted tokens enter the product as they come, their
squares are summed beside it, and the root scales the sums at the end. Of the spans of a tile the
program that arrives last, by a count in ``arrivals``, adds up all of them in order.
Must not know: how tiles and spans are chosen (``launch``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.skinny_gemm import launch
from pallas_kernels.skinny_gemm.sizes import ARRIVALS, sizes_of


@triton.jit
def _product(
    x,  # [T, I]
    w,  # [I, O]; with SWIGLU [I, 2 * O]
    norm,  # [I]; anything without HAS_NORM
    residual,  # [T, O]; anything without HAS_RESIDUAL
    arrivals,  # int32[>= tiles]; unused with one split
    out,  # [T, O]
    parts,  # float32[tiles, SPLITS, 1 or 2, BLOCK_T, BLOCK_N]; unused with one split
    sums,  # float32[tiles, SPLITS, BLOCK_T]: of squares; unused with one split
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Tiles of the same weights are neighbours, and then those of neighbouring columns.
    split = tl.program_id(2)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_N)
    token = tl.program_id(0) * BLOCK_T + row
    n = tl.program_id(1) * BLOCK_N + column
    HALVES: tl.constexpr = SWIGLU + 1
    WIDTH: tl.constexpr = HALVES * OUTER
    SPAN: tl.constexpr = ((INNER + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    start = split * SPAN
    end = tl.minimum(start + SPAN, INNER)

    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    if HAS_NORM:
        k = start + tl.arange(0, BLOCK_K)
        norms = tl.load(norm + k, mask=k < INNER, other=0.0)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at_x = token[:, None] * INNER + k[None, :]
        at_w = k[:, None] * WIDTH + n[None, :]
        readable = (k < INNER)[:, None] & (n < OUTER)[None, :]
        tokens = tl.load(x + at_x, mask=(token < TOKENS)[:, None] & (k < INNER)[None, :], other=0.0)
        weights = tl.load(w + at_w, mask=readable, other=0.0)
        if HAS_NORM:
            tokens32 = tokens.to(tl.float32)
            squares += tl.sum(tokens32 * tokens32, 1)
            tokens = (tokens32 * norms.to(tl.float32)[None, :]).to(tokens.dtype)
            # Too small a load for the compiler to start ahead of time.
            norms = tl.load(norm + k + BLOCK_K, mask=k + BLOCK_K < INNER, other=0.0)
        acc = tl.dot(tokens, weights, acc, input_precision="ieee")
        if SWIGLU:
            ups = tl.load(w + at_w + OUTER, mask=readable, other=0.0)
            up = tl.dot(tokens, ups, up, input_precision="ieee")

    inside = (token < TOKENS)[:, None] & (n < OUTER)[None, :]
    if SPLITS > 1:
        HALF: tl.constexpr = BLOCK_T * BLOCK_N
        at_part = tile * (SPLITS * HALVES * HALF) + row[:, None] * BLOCK_N + column[None, :]
        at_sum = tile * (SPLITS * BLOCK_T) + row
        tl.store(parts + at_part + split * (HALVES * HALF), acc, mask=inside)
        if SWIGLU:
            tl.store(parts + at_part + split * (HALVES * HALF) + HALF, up, mask=inside)
        if HAS_NORM:
            tl.store(sums + at_sum + split * BLOCK_T, squares)
        # Every thread's stores come before the one thread's count, and its count before every
        # thread's loads; ``.cg`` reads past the first cache, which may hold what lay there before.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_T,), tl.float32)
        for i in range(SPLITS):
            part = parts + at_part + i * (HALVES * HALF)
            acc += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            if SWIGLU:
                up += tl.load(part + HALF, mask=inside, other=0.0, cache_modifier=".cg")
            if HAS_NORM:
                squares += tl.load(sums + at_sum + i * BLOCK_T, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)  # for the next call

    if HAS_NORM:
        scale = tl.rsqrt(squares / INNER + EPS)[:, None]
        acc *= scale
        up *= scale
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at_out = token[:, None] * OUTER + n[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at_out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=inside)


def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    arrivals: jax.Ref | None,  # int32[>= ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
    parts: int,
) -> jax.Array:  # [T, O]
    """See ``skinny_gemm.api``."""
    choice = launch.choose(sizes_of(x, w, norm, swiglu))
    return launched(choice, x, w, norm, residual, arrivals, eps=eps, swiglu=swiglu, parts=parts)


def launched(
    choice: launch.Launch,
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    arrivals: jax.Ref | None,  # int32[>= ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
    parts: int,
) -> jax.Array:  # [T, O]
    """``skinny_gemm`` cut up as ``choice`` says; for it and for the tuner."""
    del parts  # one, as ``launch.supports`` says
    sizes = sizes_of(x, w, norm, swiglu)
    rows, columns = choice.tiles(sizes)
    halves, splits = 1 + swiglu, choice.splits
    if splits > 1 and rows * columns > ARRIVALS:
        raise ValueError(f"{choice} cuts up more than {ARRIVALS} tiles of {sizes}")
    cut = (rows * columns, splits) if splits > 1 else (1, 1)
    part = (halves, choice.block_t, choice.block_n) if splits > 1 else (1,)
    if arrivals is None:
        arrivals = jax.new_ref(jnp.zeros(ARRIVALS if splits > 1 else 1, jnp.int32))
    out, *_ = jt.triton_call(
        x,
        w,
        x if norm is None else norm,
        x if residual is None else residual,
        arrivals,
        kernel=_product,
        out_type=(
            jax.ShapeDtypeStruct((sizes.tokens, sizes.outer), x.dtype),
            jax.ShapeDtypeStruct((*cut, *part), jnp.float32),
            jax.ShapeDtypeStruct((*cut, choice.block_t if splits > 1 else 1), jnp.float32),
        ),
        grid=(rows, columns, splits),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        EPS=eps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        TOKENS=sizes.tokens,
        INNER=sizes.inner,
        OUTER=sizes.outer,
        SPLITS=splits,
        BLOCK_T=choice.block_t,
        BLOCK_N=choice.block_n,
        BLOCK_K=choice.block_k,
    )
    return out
