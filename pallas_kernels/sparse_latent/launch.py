"""Which calls the Triton kernel of sparse_latent supports, its tile sizes and splits.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.latent_decode.launch import MAX_HEADS, MAX_RANK, MAX_ROPE, MIN_TILE
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.latent_pages import pools_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.token_tiles import tile_width
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

# Tokens of a launch. Absorbed queries and sums of latents are four times as wide as queries and
# values: 268 MB for 1,024 tokens of 128 heads. Such a launch has 2,048 CTAs, so its end, in which
# SMs wait, is short.
MOST_TOKENS = 1024
# Of a split at least, so that one is read while another is multiplied. With one, a tile of 64 heads
# would write more bytes of its state (2,056 of a head) than it reads of entries (1,152 of a
# position). Estimated, not measured.
MIN_BLOCKS = 2


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters. ``block``: positions per loop iteration, a power of two."""

    heads: int  # of a CTA
    splits: int
    block: int
    num_warps: int
    num_stages: int


def supports(args: SparseLatentArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    rank = args.k_up.shape[1]
    rope = sum(pool.shape[-1] for pool in pools_of(args)[::2]) - rank
    for name, size, most in (("latents", rank, MAX_RANK), ("rotated keys", rope, MAX_ROPE)):
        if power_of_two(size) != size or not MIN_TILE <= size <= most:
            return f"{name} have {size} components, not a power of two from {MIN_TILE} to {most}"
    return unfit_for_triton(args.q, args.pages)


def choose_config(args: SparseLatentArgs) -> TritonConfig:
    """As many splits as fill the GPU with one CTA an SM; blocks such that the stages fit in it.

    Tiles and warps are those of ``latent_decode``, whose arithmetic is the same. They were measured
    there (H100); for entries at chosen positions nothing has been measured.
    """
    (tokens, heads, _), item = args.q.shape, args.q.dtype.itemsize
    tile = MIN_TILE if heads <= 2 * MIN_TILE else MAX_HEADS
    if item > 2:  # without tensor cores larger tiles would spill registers
        tile, block, num_warps, num_stages = MIN_TILE, 16, 8, 2
    elif tile == MIN_TILE:
        # Bound by memory. The compiler divides stages between the read of a slot and that of its
        # entry: of 10 it makes 4 blocks of 37 KB, of which 3 are in flight (4.1 TB/s for 1 us are
        # 31 KB of an SM, and entries are small and scattered).
        block, num_warps, num_stages = 32, 8, 10
    else:  # queries and two blocks of 64 entries fill the shared memory
        block, num_warps, num_stages = 64, 8, 3
    if args.scales is not None and item == 2:
        # 8 bits pass through registers, which smaller tiles of wide latents would spill
        tile = MAX_HEADS if args.k_up.shape[1] > MAX_RANK // 2 else tile
        block, num_stages = 32, 3
    ctas = tile_width(tokens, MOST_TOKENS, cap=MOST_TOKENS) * -(-heads // tile)
    splits = min(current_device().num_sms // ctas, args.positions.shape[1] // (MIN_BLOCKS * block))
    return TritonConfig(tile, max(splits, 1), block, num_warps, num_stages)


def workspace(args: SparseLatentArgs) -> int:
    """Queries that have absorbed the expansion to keys and sums of latents, each twice, as GEMMs of
    heads order them by head; the states of splits; and the slots of positions.
    """
    (tokens, heads, _), rank, config = args.q.shape, args.k_up.shape[1], choose_config(args)
    tokens = tile_width(tokens, MOST_TOKENS, cap=MOST_TOKENS)
    of_splits = 4 * config.splits * (rank + 2) if config.splits > 1 else 0
    of_heads = heads * (4 * rank * args.q.dtype.itemsize + of_splits)
    return tokens * (of_heads + 4 * args.positions.shape[1])
