"""Which calls the Triton kernel of short_conv supports, and its launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.short_conv.ref import ShortConvArgs

MAX_WIDTH = 8  # taps, whose loop is unrolled
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512


@dataclass(frozen=True)
class TritonConfig:
    """The tile of a CTA, and its warps. A row's first tile has all tokens that read the state."""

    tokens: int  # at least W - 1
    channels: int
    num_warps: int


def supports(args: ShortConvArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.weights.shape[0] > MAX_WIDTH:
        return f"the convolution has {args.weights.shape[0]} taps, more than {MAX_WIDTH}"
    return unfit_for_triton(args.x, args.kept)


def workspace_bytes(args: ShortConvArgs) -> int:
    """The outputs; ``kept`` is updated in place."""
    return args.x.shape[0] * args.weights.shape[1] * args.x.dtype.itemsize


def choose_config(args: ShortConvArgs) -> TritonConfig:
    """Each thread has 8 channels: loads of 16 bytes, if an input has 2.

    One layer of Qwen3.5-4B, 8,192 tokens of one row, H200, us: 115 with 8 tokens and 512 or 1024
    channels, 124 with 16 and 512, 131 with 32 and 1024 (bench/results/h200/short_conv.json).
    """
    del args
    return TritonConfig(tokens=8, channels=512, num_warps=2)
