"""How Triton kernels exchange values in the memory that ``lib.exchange`` describes.

A CTA writes its values into the memory of the other devices, sets a flag there (``send``), and
waits for theirs (``received``). The flag has the number of the CTA's exchange, which each CTA
counts in its own device's memory: nothing comes from the host, and a CUDA graph can be replayed. A
device cannot be two exchanges ahead of another one, as it waits in each, so those with even and
odd numbers have data of their own, and nothing else protects it.

Source: NCCL's and vLLM's all-reduces of small arrays work alike; the protocol is that of a
seqlock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.lib import exchange

CTAS = tl.constexpr(exchange.CTAS)
MAX_VALUES = tl.constexpr(exchange.MAX_VALUES)

# A read takes about 0.6 us, so these are about 5 s. After it a device counts as lost, and later
# exchanges do not wait.
MAX_READS = 8_000_000


def parameters(devices: int, data: int) -> dict[str, Any]:
    """The parameters of a kernel that exchanges the data that begins at a word."""
    lost = exchange.lost_word(devices)
    return {"RANKS": devices, "LOST": lost, "DATA": data, "MAX_READS": MAX_READS}


class Sent(NamedTuple):
    """An exchange of a CTA, whose values it has sent."""

    own: Any  # float32[TILE]: this device's values
    inside: Any  # bool[TILE]
    rank: Any  # of this device
    words: Any  # pointer to int32: this device's memory
    cta: Any
    number: Any  # of the CTA's exchanges
    at: Any  # int32[TILE]: the words of the data of rank 0, with 16 bytes aligned
    reads: Any  # how often ``received`` reads a flag: once if a device is lost


@triton.jit
def words_of(addresses, rank):
    """The exchange memory of a device, as a pointer to int32."""
    low = tl.load(addresses + 2 * rank).to(tl.uint32).to(tl.uint64)
    high = tl.load(addresses + 2 * rank + 1).to(tl.uint32).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def send(
    own,  # float32[TILE]
    place,  # int32[TILE]: of the values in each device's data, with 16 bytes aligned
    inside,  # bool[TILE]
    rank,
    addresses,  # int32[2 * RANKS]
    words,  # int32: this device's memory
    cta,
    number,  # of this exchange of the CTA
    RANKS: tl.constexpr,
    LOST: tl.constexpr,
    DATA: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    """Write values into the memory of the other devices, and then the number into its flag.

    A mask, no branch, leaves the own memory out: Triton 3.6 does not compile the branches of three
    devices (TritonGPURemoveLayoutConversions, bfloat16).
    """
    at = DATA + (number & 1) * RANKS * MAX_VALUES + place
    to = at + rank * MAX_VALUES
    for peer in tl.static_range(RANKS):  # type: ignore[misc]
        data = words_of(addresses, peer).to(tl.pointer_type(tl.float32)) + to
        tl.store(tl.multiple_of(data, 16), own, mask=inside & (peer != rank))
    tl.debug_barrier()  # the flag is set after the writes of all threads
    for peer in tl.static_range(RANKS):  # type: ignore[misc]
        if peer != rank:
            flag = words_of(addresses, peer) + (1 + rank) * CTAS + cta
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
    reads = tl.where(tl.load(words + LOST, volatile=True) != 0, 0, MAX_READS)
    return Sent(own, inside, rank, words, cta, number, at, reads)


@triton.jit
def received(
    sent,  # see ``Sent``
    peer,
    LOST: tl.constexpr,
):
    """The values of a device, float32[TILE]: its own ones, or those that it waits for; NaN if the
    other device does not answer.

    Branches have no result but ``came``: Triton 3.6 does not compile tensors that come from one
    (TritonGPURemoveLayoutConversions, three devices with bfloat16).
    """
    at = sent.at + peer * MAX_VALUES
    came = sent.rank >= 0
    if peer != sent.rank:
        flag = sent.words + (1 + peer) * CTAS + sent.cta
        seen = tl.load(flag, volatile=True)
        done = 0
        # a faster device may be one ahead
        while (seen - sent.number < 0) & (done < sent.reads):
            seen = tl.load(flag, volatile=True)
            done += 1
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        came = seen - sent.number >= 0
        if not came:
            tl.store(sent.words + LOST, 1)
    data = tl.multiple_of(sent.words.to(tl.pointer_type(tl.float32)) + at, 16)
    theirs = tl.load(data, mask=sent.inside & (peer != sent.rank), other=0.0, volatile=True)
    return tl.where(peer == sent.rank, sent.own, tl.where(came, theirs, float("nan")))
