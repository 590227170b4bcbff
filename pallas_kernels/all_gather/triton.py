"""all_gather in Triton: one launch; each CTA exchanges tiles of its device's values.

See ``lib.exchange_triton`` for the protocol. A CTA that has several tiles exchanges one after the
other, while other CTAs of its SM write or wait: together they have up to 2 MiB in flight, which
NVLink moves in 5 us, and an exchange without data takes about 4 us.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce.ref import peer_arrays
from pallas_kernels.lib import exchange_triton
from pallas_kernels.lib.exchange import TILE, data_word
from pallas_kernels.lib.exchange_triton import received, send, words_of


@triton.jit
def _all_gather(
    x,  # [T, WIDTH]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    order,  # see ``Peers``
    out,  # [T, COLUMNS]
    COUNT: tl.constexpr,  # T * WIDTH
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
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
        inside = value < COUNT
        own = tl.load(x + value, mask=inside, other=0.0).to(tl.float32)
        number += 1
        if RANKS > 1:
            sent = send(
                own, place, inside, rank, addresses, words, cta, number,
                RANKS, LOST, DATA, MAX_READS,
            )  # fmt: skip
        row, column = value // WIDTH, value % WIDTH
        for peer in range(RANKS):
            part = own
            if RANKS > 1:
                part = received(sent, peer, LOST)
            column_of_all = peer * WIDTH + column
            kept = inside & (column_of_all < COLUMNS)
            result = out + row * COLUMNS + column_of_all
            tl.store(result, part.to(out.dtype.element_ty), mask=kept)
    if RANKS > 1:
        tl.store(words + cta, number)


def all_gather(args: AllGatherArgs) -> jax.Array:  # [T, C]
    """See ``all_gather.api``."""
    x, peers = args.x, peer_arrays(args.peers, args.axis)
    ranks = peers[1].size // 2
    gathered: jax.Array = jt.triton_call(
        x,
        *peers,
        kernel=_all_gather,
        out_type=jax.ShapeDtypeStruct((len(x), args.columns), x.dtype),
        grid=(launch.ctas(x.size),),
        num_warps=launch.NUM_WARPS,
        num_stages=1,
        COUNT=x.size,
        WIDTH=x.shape[1],
        COLUMNS=args.columns,
        TILE=TILE,
        ROUNDS=launch.rounds(x.size),
        **exchange_triton.parameters(ranks, data_word(ranks)),
    )
    return gathered
