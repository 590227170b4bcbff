"""Which calls the Triton kernels of sample take, and how they cut them up.

Needs no Triton, so that a machine without it can ask.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.device import current_device

# Logits of a block, whose largest tells whether a later launch reads it: as few as a warp reads at
# once (16 bytes a thread), because a launch reads about as many blocks as it looks for logits.
BLOCK = 128
WARPS = 8  # of a program, but of the first launch's, and
WEIGHING_WARPS = 4  # of the third's: its sums go over threads, so fewer of them cost less
WEIGHING_PROGRAMS = 16  # of it, a row at least: few rows are weighed, and alone they fill no chip
TILE = 16 * BLOCK  # logits that a program holds at once: 8 registers a thread
RUN = 4  # logits that a thread of the fourth launch loads at once: 16 bytes
STAGES = 4  # such loads that are on their way, or being looked through
LEAST_NOTES = 16  # room of a thread's list
AT_ONCE = 4  # of these are joined with other threads' at once; 8 took 21 us longer
PROGRAMS = 8  # of a launch, a multiprocessor: twice what runs at once, to end together
MOST_BLOCKS = 64  # of a program of the first launch: 32 registers a thread
PIVOTS = 8  # levels that are compared with 2048 logits at once
FEW_BLOCKS = 256  # where no more reach a row's level, one program reads them,
FEW_TILE = 32  # of them at once: 16 registers a thread,
FEW = 1024  # and chooses among no more logits: 4 registers a thread,
FEW_PIVOTS = 16  # that are compared with as many levels at once
WIDE = 128  # a nucleus that misses less than this part of the blocks: maybe five logits a block
LEVELS = 16  # its threshold is bracketed between these first
SEARCH_STEP = 1024  # logits of a list that one program reads at once
SEARCH_PIVOTS = 4  # sums are 64 bits wide: more would leave a multiprocessor one program, not two
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


def _programs() -> int:
    return PROGRAMS * current_device().multiprocessors


def programs_per_row(rows: int, tiles: int) -> int:
    """As many as fill the chip; each takes the tiles whose number it is, modulo this, in turn."""
    return max(1, min(tiles, _programs() // rows))


def notes(loads: int, programs: int) -> int:
    """Logits that a thread can list of those it loads, a row's loads being shared by so many
    programs: a quarter, but of few all that chance may give it. Lists of realistic rows are far
    shorter; where one overflows, the whole row is searched instead.
    """
    most = RUN * -(-loads // programs)
    return min(most, max(most // 4, LEAST_NOTES))


def blocks_per_program(rows: int, blocks: int) -> int:
    """As many as leave enough programs to fill the chip; a power of two. Not yet timed."""
    count = MOST_BLOCKS
    while count > 4 and 2 * rows * blocks < _programs() * count:
        count //= 2
    return count
