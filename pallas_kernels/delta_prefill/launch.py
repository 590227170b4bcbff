"""Which calls the Triton kernels of delta_prefill support, and their launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.numerics import power_of_two

MIN_DIM, MAX_DIM = 16, 128  # at least a tile of tl.dot
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512


@dataclass(frozen=True)
class TritonConfig:
    """Launch parameters: of the kernel over chunks, and of the scan over them."""

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


def choose_config(args: DeltaPrefillArgs) -> TritonConfig:
    """A scan is bound by its latency, so the values of a head are split over CTAs."""
    if args.k.dtype.itemsize > 2:
        return TritonConfig(MIN_DIM, chunk_warps=4, scan_warps=4, scan_stages=1)
    values = min(args.v.shape[2], 32)
    return TritonConfig(values, chunk_warps=4, scan_warps=4, scan_stages=2)
