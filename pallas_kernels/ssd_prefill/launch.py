"""Which calls the Triton kernels of ssd_prefill support, and their launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs

MIN_DIM, MAX_STATE = 16, 256  # at least a tile of tl.dot
# With 128 columns in float32 a thread would spill 1.7 kB of its registers.
MAX_FLOAT32_STATE = 64
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512
MOST_STEP = 3e38  # nearly the largest float32: no limit
HEADS_TILE = 4  # heads of a group that a CTA of the first kernel has, one after the other


@dataclass(frozen=True)
class TritonConfig:
    """Launch parameters of the kernel over chunks, and of the scan over them."""

    values: int  # inputs of a head that a CTA of the scan has
    chunk_warps: int
    scan_warps: int
    scan_stages: int


def supports(args: SsdPrefillArgs) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    item = args.mixed.dtype.itemsize
    return unfit_states(args.states, MAX_STATE if item == 2 else MAX_FLOAT32_STATE) or (
        unfit_for_triton(args.mixed, args.mixed)
    )


def unfit_states(states: jax.Array, most: int) -> str | None:
    """Why no Triton kernel has states of these widths, or None."""
    *_, width, size = states.shape
    if power_of_two(size) != size or not MIN_DIM <= size <= most:
        return f"states have {size} columns, not a power of two from {MIN_DIM} to {most}"
    if width % MIN_DIM:
        return f"heads have {width} components, not a multiple of {MIN_DIM}"
    return None


def finite_limits(limits: tuple[float, float]) -> dict[str, Any]:
    """The limits of steps as constants of a kernel, which are finite."""
    return {"LOWEST": limits[0], "HIGHEST": min(limits[1], MOST_STEP)}


def workspace_bytes(args: SsdPrefillArgs) -> int:
    """The arrays between the two kernels, of each chunk and head: steps, their sums and scores; and
    the outputs.
    """
    (_, heads, width, _), item = args.states.shape, args.mixed.dtype.itemsize
    chunks = args.mixed.shape[0] // CHUNK + args.begins.shape[0] + 1
    of_head = CHUNK * (2 * 4 + CHUNK * item)
    return chunks * heads * of_head + args.mixed.shape[0] * heads * width * item


def choose_config(args: SsdPrefillArgs) -> TritonConfig:
    """The inputs of a head are split over CTAs, which have their part of the state in registers.

    32 inputs of 256 columns are 32 registers of a thread with 8 warps. With two stages an SM has
    two CTAs of states of 128 columns, and one of 256. A prompt of 1,024 tokens of
    Falcon-H1-1.5B takes 54 us of scan and 16 of chunks a layer on an H200. No other
    configuration has been measured.
    """
    width, state_dim = args.states.shape[2:]
    if args.mixed.dtype.itemsize > 2:  # larger tiles would spill registers
        return TritonConfig(MIN_DIM, chunk_warps=4, scan_warps=4, scan_stages=1)
    values, warps = MIN_DIM if width % 32 else 32, 8 if state_dim > 128 else 4
    return TritonConfig(values, chunk_warps=4, scan_warps=warps, scan_stages=2)
