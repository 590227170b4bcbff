"""all_reduce_norm in Triton: one launch, one CTA per row.

The exchange is that of ``all_reduce``, with counters, flags and data of its own for each row
(``lib.exchange``). Loads that need no other device come before the wait.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.all_reduce.ref import peer_arrays
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs, Pair
from pallas_kernels.lib import exchange, exchange_triton
from pallas_kernels.lib.exchange_triton import received, send, words_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.residual_norm.launch import num_warps

FIRST_CTA = tl.constexpr(exchange.MAX_CTAS)
MAX_ROW_VALUES = tl.constexpr(exchange.MAX_ROW_VALUES)


@triton.jit
def _exchanged(
    own,  # float32[TILE]: what this device adds to the row
    component,  # int32[TILE]
    inside,  # bool[TILE]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    RANKS: tl.constexpr,
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    """The sum over the devices, in the order of their ranks; NaN where one does not answer."""
    cta = FIRST_CTA + tl.program_id(0)
    rank = tl.load(rank_at)
    words = words_of(addresses, rank)
    number = tl.load(words + cta) + 1
    place = tl.program_id(0) * MAX_ROW_VALUES + component
    sent = send(
        own, place, inside, rank, addresses, words, cta, number, RANKS, LOST, DATA, MAX_READS
    )
    sums = tl.zeros_like(own)
    for peer in range(RANKS):  # not unrolled, which would take registers
        sums += received(sent, peer, LOST)
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
    RANKS: tl.constexpr,  # this and the next three: see ``exchange_triton.parameters``
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
            delta, component, inside, rank_at, addresses, RANKS, LOST, DATA, MAX_READS
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
        **exchange_triton.parameters(ranks, exchange.row_word(ranks)),
    )
    return total, normed
