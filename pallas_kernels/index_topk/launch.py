"""Which calls the Triton kernels of index_topk support, and their launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.index_topk.ref import IndexTopkArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.token_tiles import tile_width

MIN_TILE = 16  # of tl.dot, in every dimension
MAX_DIM, MAX_HEADS = 128, 64
# Bytes of the scores that are in memory at the same time, of at least one token. A launch for all
# tokens of a long prompt would need some GB.
SCORE_BYTES = 64 << 20
MOST_TOKENS = 1024  # of a launch, which then fills the GPU several times
# CTAs of an SM that its shared memory and registers have space for, each with a block of keys and
# the next one. Estimated from the compiler's report, not measured.
CTAS_OF_SM = 2
CHUNK = 8192  # scores that a CTA looks at in one iteration: 16 of a thread
# A part of a long context has at least so many times K scores. Estimated, not measured: one CTA
# would choose from 131,072 scores in 160 us; 16 CTAs, each with a part, and then one with the
# scores that they have chosen take 45 us.
PART = 4


@dataclass(frozen=True)
class ScoresConfig:
    """Tile sizes and launch parameters. ``block``: keys per loop iteration, a power of two."""

    splits: int  # of the context of a token
    block: int
    num_warps: int
    num_stages: int


def supports(args: IndexTopkArgs) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    (_, heads, width), pages = args.q.shape, args.pages
    if power_of_two(width) != width or not MIN_TILE <= width <= MAX_DIM:
        return f"keys have {width} components, not a power of two from {MIN_TILE} to {MAX_DIM}"
    if heads > MAX_HEADS:
        return f"{heads} heads are more than {MAX_HEADS}"
    if pages.dtype != args.q.dtype:
        return f"the pages are {pages.dtype}, not {args.q.dtype}"
    return unfit_for_triton(args.q, pages)


def length_of(args: IndexTopkArgs) -> int:
    """The positions that a row of the page table can have."""
    return args.page_table.shape[1] * args.pages.shape[1]


def most_tokens(args: IndexTopkArgs) -> int:
    """The tokens whose scores are in memory at the same time."""
    return tile_width(len(args.q), SCORE_BYTES // (4 * length_of(args)), cap=MOST_TOKENS)


def parts_of(args: IndexTopkArgs) -> tuple[int, int]:
    """The parts of a context from each of which K positions are chosen first, and the positions of
    a part; one part if the context is no longer than two.
    """
    length, size = length_of(args), max(CHUNK, PART * args.width)
    return (-(-length // size), size) if length > 2 * size else (1, length)


def scores_config(args: IndexTopkArgs) -> ScoresConfig:
    """As many splits of a context as fill the GPU, if tokens see equally many keys."""
    # tiles from the compiler's report: none spills registers
    wide = args.q.dtype.itemsize > 2
    block, num_warps, num_stages = (32, 8, 2) if wide else (128, 4, 3)
    ctas = CTAS_OF_SM * current_device().num_sms
    splits = min(-(-ctas // most_tokens(args)), -(-length_of(args) // block))
    return ScoresConfig(splits, block, num_warps, num_stages)


def workspace(args: IndexTopkArgs) -> int:
    """The scores, and the positions and scores that are chosen from parts."""
    parts, _ = parts_of(args)
    listed = 8 * parts * args.width if parts > 1 else 0
    return most_tokens(args) * (4 * length_of(args) + listed)
