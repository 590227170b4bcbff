"""How Triton kernels exchange values in the memory that ``all_reduce.launch`` describes.

A CTA writes its values into the memory of the other devices, sets a flag there (``send``), and
waits for theirs (``received``). The flag has the number of the CTA's exchange, which each CTA
counts in its own device's memory: nothing comes from the host, and a CUDA graph can be replayed. A
device cannot be two exchanges ahead of another one, as it waits in each, so those with even and
odd numbers have data of their own, and nothing else protects it.

Source: NCCL's and vLLM's all-reduces of small arrays work alike; the protocol is that of a
seqlock.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A read takes about 0.6 us, so these are about 5 s. After it a device counts as lost, and later
# exchanges do not wait.
MAX_READS = 8_000_000


@triton.jit
def words_of(addresses, rank):
    """The exchange memory of a device, as a pointer to int32."""
    low = tl.load(addresses + 2 * rank).to(tl.uint32).to(tl.uint64)
    high = tl.load(addresses + 2 * rank + 1).to(tl.uint32).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def send(
    own,  # float32[TILE]
    at,  # int32[TILE]: the words of the data, with 16 bytes aligned
    inside,  # bool[TILE]
    rank,
    addresses,  # int32[2 * RANKS]
    cta,
    number,  # of this exchange of the CTA
    RANKS: tl.constexpr,
    CTAS: tl.constexpr,
):
    """Write values into the memory of the other devices, and then the number into its flag."""
    for peer in tl.static_range(RANKS):  # type: ignore[misc]
        if peer != rank:
            data = words_of(addresses, peer).to(tl.pointer_type(tl.float32)) + at
            tl.store(tl.multiple_of(data, 16), own, mask=inside)
    tl.debug_barrier()  # the flag is set after the writes of all threads
    for peer in tl.static_range(RANKS):  # type: ignore[misc]
        if peer != rank:
            flag = words_of(addresses, peer) + (1 + rank) * CTAS + cta
            tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def reads_left(words, LOST: tl.constexpr, MAX_READS: tl.constexpr):
    """How often ``received`` reads a flag: once if a device is lost."""
    return tl.where(tl.load(words + LOST, volatile=True) != 0, 0, MAX_READS)


@triton.jit
def received(
    at,  # int32[TILE]: the words of the data, with 16 bytes aligned
    inside,  # bool[TILE]
    peer,
    words,  # int32: this device's memory
    cta,
    number,
    reads,  # see ``reads_left``
    CTAS: tl.constexpr,
    LOST: tl.constexpr,
):
    """The values of another device, float32[TILE]; NaN if it does not answer."""
    flag = words + (1 + peer) * CTAS + cta
    seen = tl.load(flag, volatile=True)
    done = 0
    while (seen - number < 0) & (done < reads):  # a faster device may be one ahead
        seen = tl.load(flag, volatile=True)
        done += 1
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    came = seen - number >= 0
    if not came:
        tl.store(words + LOST, 1)
    data = words.to(tl.pointer_type(tl.float32)) + at
    data = tl.load(tl.multiple_of(data, 16), mask=inside, other=0.0, volatile=True)
    return tl.where(came, data, float("nan"))
