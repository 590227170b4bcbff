"""Which calls the Triton kernels of latent_prefill support, and their tile sizes.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.numerics import power_of_two

MIN_TILE = 16  # of tl.dot, in every dimension
MAX_DIM, MAX_RANK = 128, 512
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters of a kernel; ``tokens`` and ``block`` are powers of two."""

    tokens: int  # queries of a CTA, of one head
    block: int  # keys per loop iteration
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TritonConfigs:
    """The configs of the two kernels."""

    chunk: TritonConfig
    context: TritonConfig


def supports(args: LatentPrefillArgs) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    heads, rank = args.q.shape[1], args.k_up.shape[1]
    sizes = {
        "keys without rope": (args.k_up.shape[0] // heads, MAX_DIM),
        "rotated keys": (args.entries.shape[1] - rank, MAX_DIM),
        "values": (args.v_up.shape[0] // heads, MAX_DIM),
        "latents": (rank, MAX_RANK),
    }
    for name, (size, most) in sizes.items():
        if power_of_two(size) != size or not MIN_TILE <= size <= most:
            return f"{name} have {size} components, not a power of two from {MIN_TILE} to {most}"
    if args.scale <= 0.0:
        return f"scale {args.scale} is not positive"
    return unfit_for_triton(args.q, args.pages)


def choose_configs(
    q: jax.Array,  # [T, N, D + R]
    *,
    scaled: bool = False,  # whether latents have 8 bits, which pass through registers
) -> TritonConfigs:
    """From the compiler's report: the largest tiles without spilled registers."""
    if q.dtype.itemsize > 2:  # without tensor cores larger tiles would spill
        return TritonConfigs(TritonConfig(16, 16, 4, 2), TritonConfig(16, 16, 8, 2))
    return TritonConfigs(TritonConfig(128, 64, 8, 3), TritonConfig(64, 32 if scaled else 64, 8, 3))
