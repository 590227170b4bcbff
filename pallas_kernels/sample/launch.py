"""Which calls the Triton kernels of sample support, and their launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.sample.ref import SampleArgs

# Logits of a block, whose largest decides whether a later launch reads it. As small as one load of
# a warp (16 bytes a thread), since a launch reads about as many blocks as it needs logits.
BLOCK = 128
NUM_WARPS = 8  # per CTA, except _summarize and
WEIGH_NUM_WARPS = 4  # _weigh_levels: its sums are across threads, so fewer warps cost less
WEIGH_MIN_CTAS = 16  # of _weigh_levels per row: few rows need it, and one CTA each leaves SMs idle
TILE = 16 * BLOCK  # logits that a CTA holds at a time: 8 registers a thread
VECTOR = 4  # logits that a thread of _collect loads at once: 16 bytes
STAGES = 4  # of these loads in flight or in use
MIN_CANDIDATES = 16  # smallest capacity of a thread's candidate list
JOIN_STEP = 4  # candidates of each thread that are joined at a time; 8 took 21 us longer
CTAS_PER_SM = 8  # of a launch: twice the number that runs at a time, for an even end
MAX_BLOCKS_PER_CTA = 64  # of _summarize: 32 registers a thread
PIVOTS = 8  # levels that are compared with 2048 logits at once
FEW_BLOCKS = 256  # up to so many blocks that reach a row's level are read by one CTA,
FEW_TILE = 32  # so many at a time: 16 registers a thread;
FEW = 1024  # it chooses among up to so many logits: 4 registers a thread,
FEW_PIVOTS = 16  # which are compared with so many levels at once
WIDE = 128  # a nucleus is wide if less than this part of the blocks is below: ~5 logits a block
LEVELS = 16  # levels that first bracket the threshold of a wide nucleus
SEARCH_STEP = 1024  # logits of a list that one CTA reads at a time
SEARCH_PIVOTS = 4  # sums are 64 bits wide; with more pivots one CTA fits on an SM instead of two
MAX_VOCAB = 1 << 20


def supports(args: SampleArgs) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    if args.masks is not None:
        return "there are masks"
    if args.logits.shape[1] > MAX_VOCAB:
        return f"a vocabulary of {args.logits.shape[1]} is above {MAX_VOCAB}"
    return unfit_for_triton(args.logits, args.logits)


def _max_ctas() -> int:
    return CTAS_PER_SM * current_device().num_sms


def ctas_per_row(rows: int, tiles: int) -> int:
    """Enough to fill the GPU; CTA i of n takes the tiles i, i + n, ..."""
    return max(1, min(tiles, _max_ctas() // rows))


def candidates_per_thread(loads: int, ctas: int) -> int:
    """Capacity of a thread's candidate list: a quarter of the logits that it loads, or all if these
    are few. ``loads``: vectors of a row per thread position, divided among ``ctas``.

    Lists of realistic rows are far shorter. On overflow the whole row is searched.
    """
    loaded = VECTOR * -(-loads // ctas)
    return min(loaded, max(loaded // 4, MIN_CANDIDATES))


def blocks_per_cta(rows: int, blocks: int) -> int:
    """As many as leave enough CTAs to fill the GPU; a power of two. Not yet timed."""
    count = MAX_BLOCKS_PER_CTA
    while count > 4 and 2 * rows * blocks < _max_ctas() * count:
        count //= 2
    return count
