"""Which calls the Triton kernel of ssd_decode supports, and its launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill.launch import MAX_STATE, unfit_states

MAX_WIDTH = 8  # taps of a convolution, whose loop is unrolled
STATE_OF_CTA = 4096  # elements
STATE_OF_THREAD = 32


@dataclass(frozen=True)
class TritonConfig:
    """The inputs of a head that a CTA has, and its warps."""

    values: int
    num_warps: int


def supports(args: SsdDecodeArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.conv is not None and len(args.conv) > MAX_WIDTH:
        return f"the convolution has {len(args.conv)} taps, more than {MAX_WIDTH}"
    inputs = args.mixed if args.convs is None else args.convs
    return unfit_states(args.states, MAX_STATE) or unfit_for_triton(args.mixed, inputs)


def choose_config(args: SsdDecodeArgs, elements: int = STATE_OF_CTA) -> TritonConfig:
    """A part of a head's state of at most so many elements, of which no sum is over two CTAs.

    One row of Falcon-H1-1.5B then has 192 CTAs for the 132 SMs of an H200, and each thread reads 8
    times 16 bytes before it needs any. 64 rows take 126 us there, at 3.2 TB/s. No other
    configuration has been measured.
    """
    width, state_dim = args.states.shape[2:]
    values = min(width & -width, max(elements // state_dim, 1))  # a power of two that divides it
    return TritonConfig(values, max(1, values * state_dim // (32 * STATE_OF_THREAD)))
