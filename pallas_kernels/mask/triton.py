"""mask in Triton: CTAs that wait for the number of their row in host memory, then read its bits."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.mask.board import mask_words, number_words

# Words of an iteration, 8,192 tokens. A thread has two in flight: a read of host memory takes 1 to
# 2 us, and one after the other, of 32 tokens each, those of a vocabulary took 0.9 ms (H100).
TILE = 256
PARTS = 16  # CTAs of a row
# A read of host memory takes about 1 us, so these are some seconds. A mask comes within
# milliseconds, unless the host's process is stopped or its thread has died.
MAX_READS = 4_000_000


@triton.jit
def _mask(
    finite,  # int32[B]: not read; it makes the kernel wait for the reader of the same logits
    wanted,  # int32[B]
    slots,  # int32[B]
    place,  # int32[3]
    logits,  # float32[B, V], updated in place
    in_time,  # int32[B, PARTS]
    vocab,  # V
    words,  # W
    first,  # word of the first slot's bits
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    low = tl.load(place).to(tl.uint32).to(tl.uint64)
    high = tl.load(place + 1).to(tl.uint32).to(tl.uint64)
    number = tl.load(place + 2)
    address = ((high << 32) | low).to(tl.int64)
    came = 1
    if tl.load(wanted + row) != 0:
        slot = tl.load(slots + row).to(tl.int64)
        board = address.to(tl.pointer_type(tl.int32))
        seen = tl.load(board + slot, mask=address != 0, other=0, volatile=True)
        reads = 0
        while (seen != number) & (reads < MAX_READS) & (address != 0):
            seen = tl.load(board + slot, volatile=True)
            reads += 1
        came = ((seen == number) & (address != 0)).to(tl.int32)
        # The bits are read after the number, as the branch above depends on it and loads are not
        # speculated; the host has written them before it.
        bits_of_row = board + first + slot * words
        for tile in range(part, tl.cdiv(words, TILE), PARTS):
            word = tile * TILE + tl.arange(0, TILE)
            given = (word < words) & (address != 0)
            bits = tl.load(bits_of_row + word, mask=given, other=0, volatile=True)
            number_of_bit = tl.arange(0, 32)[None, :]
            token = word[:, None] * 32 + number_of_bit
            forbidden = ((bits[:, None] >> number_of_bit) & 1 & came) == 0
            at = logits + row.to(tl.int64) * vocab + token
            tl.store(at, float("-inf"), mask=(token < vocab) & forbidden)
    tl.store(in_time + row * PARTS + part, came)


def mask(
    logits: jax.Array,  # float32[B, V]
    finite: jax.Array,  # int32[B]
    wanted: jax.Array,  # int32[B]
    slots: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
    *,
    num_slots: int,
) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """See ``mask.api``."""
    rows, vocab = logits.shape
    ref = jax.new_ref(logits)  # jax-triton updates a Ref in place
    in_time = jt.triton_call(
        finite,
        wanted,
        slots,
        place,
        ref,
        kernel=_mask,
        out_type=jax.ShapeDtypeStruct((rows, PARTS), finite.dtype),
        grid=(rows, PARTS),
        num_warps=4,
        num_stages=1,
        vocab=vocab,
        words=mask_words(vocab),
        first=number_words(num_slots),
        TILE=TILE,
        PARTS=PARTS,
        MAX_READS=MAX_READS,
    )
    return jax.freeze(ref), in_time.min(axis=1)
