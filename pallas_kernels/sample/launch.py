"""Which calls the Triton kernels of sample take, and how they cut them up.

Needs no Triton, so that a machine without it can ask. Must not know: the kernels.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton

# Logits of a block, whose largest tells whether a later pass reads it: as few as a warp reads at
# once (16 bytes a thread), because a pass reads about as many blocks as it looks for logits.
BLOCK = 128
MULTIPROCESSORS = 132  # of an H100 or H200
PROGRAMS = 4 * MULTIPROCESSORS  # of the first kernel
MOST_BLOCKS = 64  # of one of them: 32 registers a thread
PIVOTS = 8  # that it tries in one pass: 8 passes find one of 2**24 floats, bisection takes 24
LARGEST_VOCAB = 1 << 20


def supports(
    logits: jax.Array,  # float32[B, V]
    temperature: jax.Array,  # float32[B]
    top_k: jax.Array,  # int32[B]
    top_p: jax.Array,  # float32[B]
    min_p: jax.Array,  # float32[B]
    seed_low: jax.Array,  # int32[B]
    seed_high: jax.Array,  # int32[B]
    positions: jax.Array,  # int32[B]
) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    del temperature, top_k, top_p, min_p, seed_low, seed_high, positions
    if logits.shape[1] > LARGEST_VOCAB:
        return f"a vocabulary of {logits.shape[1]} is above {LARGEST_VOCAB}"
    return unfit_for_triton(logits, logits)


def listed_blocks(rows: int) -> tuple[int, int]:
    """Blocks that a program of the second kernel holds at once, and its warps.

    Of more rows than multiprocessors two share one, and each computes while the other waits.
    Chosen from the compiler's report, not yet timed: twice the blocks spill where a vocabulary is
    no multiple of 4.
    """
    return (16, 16) if rows <= MULTIPROCESSORS else (8, 8)


def blocks_per_program(rows: int, blocks: int) -> int:
    """As many as leave enough programs to fill the chip; a power of two. Not yet timed."""
    count = MOST_BLOCKS
    while count > 4 and rows * blocks < PROGRAMS * count:
        count //= 2
    return count
