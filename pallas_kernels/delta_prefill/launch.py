"""Which calls the Triton kernels of delta_prefill support, and their launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.numerics import power_of_two

MIN_DIM, MAX_DIM = 16, 128  # at least a tile of tl.dot
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512
MOST_DECAY = 60.0  # of a half of a chunk, negative, by channel: more is computed in another way
PART = 16  # components of keys at a time, by channel
INVERSE_WARPS = 4


@dataclass(frozen=True)
class TritonConfig:
    """Launch parameters of the kernel over chunks, and of the scan over them."""

    values: int  # components of the values of a CTA of the scan
    chunk_warps: int
    scan_warps: int
    scan_stages: int


def supports(args: DeltaPrefillArgs) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    for name, size in (("keys", args.k.shape[2]), ("values", args.v.shape[2])):
        if power_of_two(size) != size or not MIN_DIM <= size <= MAX_DIM:
            return f"{name} have {size} components, not a power of two from {MIN_DIM} to {MAX_DIM}"
    return unfit_for_triton(args.k, args.v)


def workspace_bytes(args: DeltaPrefillArgs) -> int:
    """The arrays between the two kernels: of each chunk and head sums, inverses (with the rest that
    16 bits lose) and scores; and the outputs.
    """
    num_rows, heads, item = args.begins.shape[0], args.v.shape[1], args.k.dtype.itemsize
    chunks = args.q.shape[0] // CHUNK + num_rows + 1
    of_chunk = CHUNK * 4 + 3 * CHUNK * CHUNK * item
    if args.by_channel:  # products of keys in float32, decayed queries and keys, and changes
        of_chunk += args.k.shape[2] * (4 + 5 * CHUNK * item)
        of_chunk += 4 * CHUNK * (CHUNK + args.v.shape[2])
    return chunks * heads * of_chunk + math.prod(args.v.shape) * args.v.dtype.itemsize


def choose_config(args: DeltaPrefillArgs) -> TritonConfig:
    """The values of a head are split over CTAs: the scan is bound by the latency of a chunk.

    One layer of Qwen3.5-4B, 8,192 tokens of one row, H200, us of the scan: 270 with 32 values, 4
    warps and 3 stages; 468 with 16 values, 429 with 8 warps, over 600 with 64 values, and 510 (of
    an earlier version) with 2 stages.
    """
    if args.by_channel:
        return _by_channel(args)
    if args.k.dtype.itemsize > 2:  # larger tiles would spill registers
        return TritonConfig(MIN_DIM, chunk_warps=4, scan_warps=4, scan_stages=1)
    return TritonConfig(min(args.v.shape[2], 32), chunk_warps=4, scan_warps=4, scan_stages=3)


def _by_channel(args: DeltaPrefillArgs) -> TritonConfig:
    """Two CTAs of 8 warps of the first kernel fit in the registers of an SM; two stages of the scan
    fill its shared memory. One layer of Kimi Linear, 8,192 tokens of one row, H200, us of the scan:
    494 (780 with one stage, 540 with 8 warps, 760 with 16 values, 670 with 64 values and 8 warps).
    """
    if args.k.dtype.itemsize > 2:
        return TritonConfig(MIN_DIM, chunk_warps=4, scan_warps=4, scan_stages=1)
    return TritonConfig(min(args.v.shape[2], 32), chunk_warps=8, scan_warps=4, scan_stages=2)
