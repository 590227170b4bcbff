"""all_reduce in Triton: one launch; each CTA adds its values of all devices.

See ``lib.exchange_triton`` for the protocol. Values are added in the order of the ranks, so that
all devices have the same bits.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce.ref import AllReduceArgs, peer_arrays
from pallas_kernels.lib import exchange_triton
from pallas_kernels.lib.exchange import TILE, data_word
from pallas_kernels.lib.exchange_triton import received, send, words_of


@triton.jit
def _all_reduce(
    partials,  # [SPLITS, count]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    order,  # see ``Peers``
    total,  # [count]
    count,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ROUNDS: tl.constexpr,
    RANKS: tl.constexpr,  # this and the next three: see ``exchange_triton.parameters``
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    cta = tl.program_id(0)
    rank = tl.load(rank_at)
    words = words_of(addresses, rank)
    place = cta * TILE + tl.arange(0, TILE)
    number = 0
    if RANKS > 1:
        number = tl.load(words + cta)
    for round in range(ROUNDS):
        value = round * tl.num_programs(0) * TILE + place
        inside = value < count
        own = tl.zeros((TILE,), tl.float32)
        for split in tl.static_range(SPLITS):  # type: ignore[misc]
            own += tl.load(partials + split * count + value, mask=inside, other=0.0).to(tl.float32)
        sums = own
        if RANKS > 1:
            number += 1
            sent = send(
                own, place, inside, rank, addresses, words, cta, number,
                RANKS, LOST, DATA, MAX_READS,
            )  # fmt: skip
            sums = tl.zeros((TILE,), tl.float32)
            for peer in tl.static_range(RANKS):  # type: ignore[misc]
                sums += received(sent, peer, LOST)
        tl.store(total + value, sums.to(total.dtype.element_ty), mask=inside)
    if RANKS > 1:
        tl.store(words + cta, number)


def all_reduce(args: AllReduceArgs) -> jax.Array:  # [T, D] or float32[1, T, D]
    """See ``all_reduce.api``."""
    partials = args.partials
    *splits, tokens, width = partials.shape
    peers = peer_arrays(args.peers, args.axis)
    ranks = peers[1].size // 2
    shape = (1, tokens, width) if splits else (tokens, width)
    total: jax.Array = jt.triton_call(
        partials,
        *peers,
        kernel=_all_reduce,
        out_type=jax.ShapeDtypeStruct(shape, partials.dtype),
        grid=(launch.ctas(tokens * width),),
        num_warps=launch.NUM_WARPS,
        num_stages=1,
        count=tokens * width,
        SPLITS=splits[0] if splits else 1,
        TILE=TILE,
        ROUNDS=launch.rounds(tokens * width),
        **exchange_triton.parameters(ranks, data_word(ranks)),
    )
    return total
