"""Which calls the Triton kernel of qk_rope_append supports, and its tile size.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs

MAX_HEAD_DIM = 512
MIN_CTAS = 256  # about two per SM of an H100 or H200
MAX_HEADS = 8  # per CTA


def supports(args: RopeAppendArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.qkv.shape[2] > MAX_HEAD_DIM:
        return f"head_dim {args.qkv.shape[2]} is above {MAX_HEAD_DIM}"
    return unfit_for_triton(args.qkv, args.k_pages)


def heads_per_cta(tokens: int, heads: int) -> int:
    """As many as leave enough CTAs to fill the GPU; a power of two. Not yet timed."""
    count = MAX_HEADS
    while count > 1 and tokens * heads < MIN_CTAS * count:
        count //= 2
    return count
