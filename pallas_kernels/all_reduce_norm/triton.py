"""all_reduce_norm in Triton: one launch, one CTA per row.

The exchange is that of ``all_reduce``, with counters, flags and data of its own for each row
(``all_reduce.launch``). Loads that need no other device come before the wait.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.all_reduce import launch as sum_launch
from pallas_kernels.all_reduce.ref import peer_arrays
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs, Pair
from pallas_kernels.lib import exchange_triton
from pallas_kernels.lib.exchange_triton import reads_left, received, send, words_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.residual_norm.launch import num_warps


@triton.jit
def _exchanged(
    own,  # float32[TILE]: what this device adds to the row
    component,  # int32[TILE]
    inside,  # bool[TILE]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    RANKS: tl.constexpr,
    FIRST_CTA: tl.constexpr,
    CTAS: tl.constexpr,
    MAX_VALUES: tl.constexpr,
    MAX_ROW_VALUES: tl.constexpr,
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    """The sum over the devices, in the order of their ranks; NaN where one does not answer."""
    cta = FIRST_CTA + tl.program_id(0)
    rank = tl.load(rank_at)
    words = words_of(addresses, rank)
    number = tl.load(words + cta) + 1
    at = DATA + (number & 1) * RANKS * MAX_VALUES + tl.program_id(0) * MAX_ROW_VALUES + component
    send(own, at + rank * MAX_VALUES, inside, rank, addresses, cta, number, RANKS, CTAS)
    reads = reads_left(words, LOST, MAX_READS)
    sums = tl.zeros_like(own)
    for peer in range(RANKS):  # not unrolled, which would take registers
        where = at + peer * MAX_VALUES
        sums += received(own, where, inside, peer, rank, words, cta, number, reads, CTAS, LOST)
    tl.store(words + cta, number)
    return sums


@triton.jit
def _sum_and_norm(
    x,  # [T, D]
    partials,  # [SPLITS, T, D]
    weights,  # [W, D]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    order,  # see ``Peers``
    total,  # [T, D]
    normed,  # [T, D]
    EPS: tl.constexpr,
    ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    FIRST_CTA: tl.constexpr,
    CTAS: tl.constexpr,
    MAX_VALUES: tl.constexpr,
    MAX_ROW_VALUES: tl.constexpr,
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    component = tl.arange(0, TILE)
    inside = component < WIDTH
    at = tl.program_id(0) * WIDTH + component
    size = tl.num_programs(0) * WIDTH
    weight = tl.load(weights + ROW * WIDTH + component, mask=inside, other=0.0, volatile=True)
    x_row = tl.load(x + at, mask=inside, other=0.0, volatile=True)
    delta = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):  # type: ignore[misc]
        delta += tl.load(partials + split * size + at, mask=inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        delta = _exchanged(
            delta,
            component,
            inside,
            rank_at,
            addresses,
            RANKS,
            FIRST_CTA,
            CTAS,
            MAX_VALUES,
            MAX_ROW_VALUES,
            LOST,
            DATA,
            MAX_READS,
        )
    delta = delta.to(partials.dtype.element_ty).to(tl.float32)  # as the sum alone rounds it
    x_row = (x_row.to(tl.float32) + delta).to(x_row.dtype)
    tl.store(total + at, x_row, mask=inside)
    x32 = x_row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + EPS)
    tl.store(normed + at, (x32 * scale * weight.to(tl.float32)).to(x_row.dtype), mask=inside)


def all_reduce_norm(args: AllReduceNormArgs) -> Pair:
    """See ``all_reduce_norm.api``."""
    x, partials = args.norm.x, args.partials
    tokens, width = x.shape
    peers = peer_arrays(args.peers, args.axis)
    ranks, tile = peers[1].size // 2, power_of_two(width)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = jt.triton_call(
        x,
        partials,
        args.norm.weights,
        *peers,
        kernel=_sum_and_norm,
        out_type=(result, result),
        grid=(tokens,),
        num_warps=num_warps(tile),
        num_stages=1,
        EPS=args.norm.eps,
        ROW=args.norm.row,
        SPLITS=partials.size // x.size,
        WIDTH=width,
        TILE=tile,
        RANKS=ranks,
        FIRST_CTA=sum_launch.MAX_CTAS,
        CTAS=sum_launch.CTAS,
        MAX_VALUES=sum_launch.MAX_VALUES,
        MAX_ROW_VALUES=sum_launch.MAX_ROW_VALUES,
        LOST=sum_launch.lost_word(ranks),
        DATA=sum_launch.row_word(ranks),
        MAX_READS=exchange_triton.MAX_READS,
    )
    return total, normed
