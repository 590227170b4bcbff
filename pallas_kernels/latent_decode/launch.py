"""Which calls the Triton kernel of latent_decode supports, and its tile sizes.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two

MIN_TILE = 16  # of tl.dot, in every dimension
MAX_HEADS = 64  # of a CTA: M of a wgmma
MAX_RANK, MAX_ROPE = 512, 64


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters. ``block``: keys per loop iteration, a power of two."""

    heads: int  # of a CTA
    splits: int
    block: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MergeConfig:
    """The merging of splits: a CTA loads ``components`` of ``splits`` splits in one iteration."""

    splits: int
    components: int

    @classmethod
    def of(cls, splits: int, rank: int) -> MergeConfig:
        """All splits of a row at once, if they are not too many for the registers.

        V2-Lite, H100, us of one layer: 2.5 with 33 splits (64 x 128; 9.2 with 16 x 512), 3.3 with
        16 (16 x 128; 4.1 with 16 x 512) and 5.6 with two (2 x 128; 4.3 with 16 x 512).
        """
        splits = min(power_of_two(splits), 64)
        return cls(splits, min(rank, max(128, 2048 // splits)))


def supports(args: LatentDecodeArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    rank, rope = args.q_latent.shape[2], args.q_rope.shape[2]
    for name, size, most in (("latents", rank, MAX_RANK), ("rotated keys", rope, MAX_ROPE)):
        if power_of_two(size) != size or not MIN_TILE <= size <= most:
            return f"{name} have {size} components, not a power of two from {MIN_TILE} to {most}"
    return unfit_for_triton(args.q_latent, args.pages)


def choose_config(args: LatentDecodeArgs) -> TritonConfig:
    """As many splits as fill the GPU with one CTA an SM; blocks such that the stages fit in it."""
    (rows, heads, _), page_size = args.q_latent.shape, args.pages.shape[1]
    # The queries of 32 heads would not fit in registers. Two CTAs that read the same entries at the
    # same time read most of them from the L2 cache.
    tile = MIN_TILE if heads <= 2 * MIN_TILE else MAX_HEADS
    if args.q_latent.dtype.itemsize > 2:  # without tensor cores larger tiles would spill registers
        tile, block, num_warps, num_stages = MIN_TILE, 16, 8, 2
    elif tile == MIN_TILE:  # bound by memory
        block, num_warps, num_stages = 32, 8, 6
    else:  # queries and two blocks of 64 keys fill the shared memory
        block, num_warps, num_stages = 64, 8, 3
    if args.scales is not None and args.q_latent.dtype.itemsize == 2:
        # 8 bits pass through registers, which smaller tiles of wide latents would spill
        tile = MAX_HEADS if args.q_latent.shape[2] > MAX_RANK // 2 else tile
        block, num_stages = 32, 3
    ctas = rows * -(-heads // tile)
    longest = args.page_table.shape[1] * page_size
    splits = min(current_device().num_sms // ctas, -(-longest // block))
    return TritonConfig(tile, max(splits, 1), block, num_warps, num_stages)
