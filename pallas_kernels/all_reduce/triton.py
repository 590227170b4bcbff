"""all_reduce in Triton: one launch; each CTA adds its values of all devices.

A CTA writes its values into the memory of the other devices, sets a flag there, waits for theirs,
and adds the values in the order of the ranks, so that all devices have the same bits. The flag has
the number of the call, which each CTA counts in its own device's memory: nothing comes from the
host, and a CUDA graph can be replayed. A device cannot be two calls ahead of another one, as it
waits in each call, so calls with even and odd numbers have data of their own, and nothing else
protects it.

Source: NCCL's and vLLM's all-reduces of small arrays work alike; the protocol is that of a
seqlock.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce.ref import AllReduceArgs, Peers

# A read takes about 0.6 us, so these are about 5 s. After it a device counts as lost, and later
# calls do not wait.
MAX_READS = 8_000_000


@triton.jit
def memory_of(addresses, rank):
    """The exchange memory of a device."""
    low = tl.load(addresses + 2 * rank).to(tl.uint32).to(tl.uint64)
    high = tl.load(addresses + 2 * rank + 1).to(tl.uint32).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64)


@triton.jit
def _all_reduce(
    partials,  # [SPLITS, count]
    rank_at,  # int32[1]
    addresses,  # int32[2 * RANKS]
    total,  # [count]
    count,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    CTAS: tl.constexpr,
    MAX_VALUES: tl.constexpr,
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    cta = tl.program_id(0)
    value = cta * TILE + tl.arange(0, TILE)
    inside = value < count
    own = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):  # type: ignore[misc]
        own += tl.load(partials + split * count + value, mask=inside, other=0.0).to(tl.float32)
    sums = own
    if RANKS > 1:
        rank = tl.load(rank_at)
        memory = memory_of(addresses, rank)
        words = memory.to(tl.pointer_type(tl.int32))
        number = tl.load(words + cta) + 1
        start = DATA + (number & 1) * RANKS * MAX_VALUES
        for peer in tl.static_range(RANKS):  # type: ignore[misc]
            if peer != rank:
                theirs = memory_of(addresses, peer).to(tl.pointer_type(tl.float32))
                tl.store(theirs + start + rank * MAX_VALUES + value, own, mask=inside)
        tl.debug_barrier()  # the flag is set after the writes of all threads
        for peer in tl.static_range(RANKS):  # type: ignore[misc]
            if peer != rank:
                theirs = memory_of(addresses, peer).to(tl.pointer_type(tl.int32))
                flag = theirs + (1 + rank) * CTAS + cta
                tl.atomic_xchg(flag, number, sem="release", scope="sys")
        waits = tl.where(tl.load(words + LOST, volatile=True) != 0, 0, MAX_READS)
        sums = tl.zeros((TILE,), tl.float32)
        for peer in tl.static_range(RANKS):  # type: ignore[misc]
            if peer == rank:
                sums += own
            else:
                flag = words + (1 + peer) * CTAS + cta
                seen = tl.load(flag, volatile=True)
                reads = 0
                while (seen - number < 0) & (reads < waits):  # a faster device may be one ahead
                    seen = tl.load(flag, volatile=True)
                    reads += 1
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                came = seen - number >= 0
                if not came:
                    tl.store(words + LOST, 1)
                theirs = memory.to(tl.pointer_type(tl.float32)) + start + peer * MAX_VALUES
                data = tl.load(theirs + value, mask=inside, other=0.0, volatile=True)
                sums += tl.where(came, data, float("nan"))
        tl.store(words + cta, number)
    tl.store(total + value, sums.to(total.dtype.element_ty), mask=inside)


def all_reduce(args: AllReduceArgs) -> jax.Array:  # [T, D] or float32[1, T, D]
    """See ``all_reduce.api``."""
    partials = args.partials
    *splits, tokens, width = partials.shape
    peers = args.peers if args.axis is not None else None
    if peers is None:
        peers = Peers(rank=jnp.zeros(1, jnp.int32), addresses=jnp.zeros(2, jnp.int32))
    ranks = peers.addresses.size // 2
    shape = (1, tokens, width) if splits else (tokens, width)
    total: jax.Array = jt.triton_call(
        partials,
        peers.rank,
        peers.addresses,
        kernel=_all_reduce,
        out_type=jax.ShapeDtypeStruct(shape, partials.dtype),
        grid=(-(-tokens * width // launch.TILE),),
        num_warps=launch.NUM_WARPS,
        num_stages=1,
        count=tokens * width,
        SPLITS=splits[0] if splits else 1,
        RANKS=ranks,
        TILE=launch.TILE,
        CTAS=launch.CTAS,
        MAX_VALUES=launch.MAX_VALUES,
        LOST=launch.lost_word(ranks),
        DATA=launch.data_word(ranks),
        MAX_READS=MAX_READS,
    )
    return total
