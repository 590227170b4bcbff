"""mask in Triton: a CTA waits for the number of its row on the board, then reads its bits."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.mask.board import mask_words
from pallas_kernels.mask.ref import MaskArgs

TILE = 1024  # words of an iteration, 32,768 tokens; each thread has four reads in flight
# A read takes about 0.6 us, so these are some seconds. A mask comes within milliseconds, unless the
# host's process is stopped or its thread has died.
MAX_READS = 8_000_000


@triton.jit
def _mask(
    finite,  # int32[B]: not read; it makes the kernel wait for the reader of the same logits
    wanted,  # int32[B]
    slots,  # int32[B]
    place,  # int32[3]
    logits,  # float32[B, V], updated in place
    in_time,  # int32[B]
    vocab,  # V
    words,  # W
    num_slots,  # S
    TILE: tl.constexpr,
    MAX_READS: tl.constexpr,
):
    row = tl.program_id(0)
    low = tl.load(place).to(tl.uint32).to(tl.uint64)
    high = tl.load(place + 1).to(tl.uint32).to(tl.uint64)
    number = tl.load(place + 2)
    address = ((high << 32) | low).to(tl.int64)
    came = 1
    if tl.load(wanted + row) != 0:
        slot = tl.load(slots + row).to(tl.int64)
        board = address.to(tl.pointer_type(tl.int32))
        number_at = board + slot
        seen = tl.load(number_at, mask=address != 0, other=0, volatile=True)
        reads = 0
        while (seen != number) & (reads < MAX_READS) & (address != 0):
            seen = tl.load(number_at, volatile=True)
            reads += 1
        came = ((seen == number) & (address != 0)).to(tl.int32)
        # The bits are read after the number, as the branch above depends on it and loads are not
        # speculated; they were copied before it.
        bits_of_row = board + num_slots + slot * words
        for tile in range(tl.cdiv(words, TILE)):
            word = tile * TILE + tl.arange(0, TILE)
            given = (word < words) & (address != 0)
            bits = tl.load(bits_of_row + word, mask=given, other=0, volatile=True)
            number_of_bit = tl.arange(0, 32)[None, :]
            token = word[:, None] * 32 + number_of_bit
            forbidden = ((bits[:, None] >> number_of_bit) & 1 & came) == 0
            at = logits + row.to(tl.int64) * vocab + token
            tl.store(at, float("-inf"), mask=(token < vocab) & forbidden)
    tl.store(in_time + row, came)


def mask(args: MaskArgs) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """See ``mask.api``."""
    rows, vocab = args.logits.shape
    ref = jax.new_ref(args.logits)  # jax-triton updates a Ref in place
    in_time = jt.triton_call(
        args.finite,
        args.wanted,
        args.slots,
        args.place,
        ref,
        kernel=_mask,
        out_type=jax.ShapeDtypeStruct((rows,), args.finite.dtype),
        grid=(rows,),
        num_warps=8,
        num_stages=1,
        vocab=vocab,
        words=mask_words(vocab),
        num_slots=args.num_slots,
        TILE=TILE,
        MAX_READS=MAX_READS,
    )
    return jax.freeze(ref), in_time
