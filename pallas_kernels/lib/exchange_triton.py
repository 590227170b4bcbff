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
    """Write values into the memory of the other devices, and then the number into its flag.

    A mask, no branch, leaves the own memory out: Triton 3.6 does not compile the branches of three
    devices (TritonGPURemoveLayoutConversions, bfloat16).
    """
    for peer in tl.static_range(RANKS):  # type: ignore[misc]
        data = words_of(addresses, peer).to(tl.pointer_type(tl.float32)) + at
        tl.store(tl.multiple_of(data, 16), own, mask=inside & (peer != rank))
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
    own,  # float32[TILE]: this device's values
    at,  # int32[TILE]: the words of the data, with 16 bytes aligned
    inside,  # bool[TILE]
    peer,
    rank,  # of this device
    words,  # int32: this device's memory
    cta,
    number,
    reads,  # see ``reads_left``
    CTAS: tl.constexpr,
    LOST: tl.constexpr,
):
    """The values of a device, float32[TILE]: its own ones, or those that it waits for; NaN if the
    other device does not answer.

    Branches have no result but ``came``: Triton 3.6 does not compile tensors that come from one
    (TritonGPURemoveLayoutConversions, three devices with bfloat16).
    """
    came = rank >= 0
    if peer != rank:
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
    data = tl.multiple_of(words.to(tl.pointer_type(tl.float32)) + at, 16)
    theirs = tl.load(data, mask=inside & (peer != rank), other=0.0, volatile=True)
    return tl.where(peer == rank, own, tl.where(came, theirs, float("nan")))
