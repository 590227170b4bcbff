"""Which calls the Triton kernel of compressed_attention supports, its tile sizes and splits.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.latent_decode.launch import MAX_HEADS, MAX_RANK, MIN_TILE
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two

# Entries of a split at least, if a token reads as many, and more of them for each CTA of the
# launch: an SM reads 64 entries in 2 us; a merge takes 3 us, and all SMs take 0.06 us to write and
# read the state of a split, 131 KB of 64 heads in float32. Estimated, not measured.
MIN_KEYS, MORE_KEYS = 128, 2
# Of the longest contexts: with more, a CTA that merges splits would have more of their states than
# registers. Each then has 260 entries of the 8,192 of a million tokens.
MAX_SPLITS = 32


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters. ``block``: entries per loop iteration, a power of two."""

    heads: int  # of a CTA
    splits: int  # at most: rows with few entries use fewer
    min_keys: int  # of a split, if a token has as many
    block: int
    num_warps: int
    num_stages: int


def supports(args: CompressedAttentionArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    width, far = args.q.shape[2], args.far_pages
    if power_of_two(width) != width or not MIN_TILE <= width <= MAX_RANK:
        return f"entries have {width} components, not a power of two from {MIN_TILE} to {MAX_RANK}"
    if far is not None and far.shape[1] % args.pieces:
        return f"pages of {far.shape[1]} do not hold whole entries of {args.pieces} pieces"
    if far is not None and far.dtype != args.pages.dtype:
        return f"the pages are {args.pages.dtype} and {far.dtype}"
    if args.pages.dtype != args.q.dtype:
        return f"the pages are {args.pages.dtype}, not {args.q.dtype}"
    return unfit_for_triton(args.q, args.pages)


def choose_config(args: CompressedAttentionArgs) -> TritonConfig:
    """As many splits as fill the GPU with one CTA an SM; blocks such that the stages fit in it.

    Nothing has been measured; the tiles are from the compiler's report.
    """
    tokens, heads, _ = args.q.shape
    tile = MIN_TILE if heads <= 2 * MIN_TILE else MAX_HEADS
    if args.q.dtype.itemsize > 2:  # without tensor cores larger tiles would spill registers
        tile, block, num_warps, num_stages = MIN_TILE, 16, 8, 2
    elif tile == MIN_TILE:  # bound by memory
        block, num_warps, num_stages = 32, 8, 6
    else:  # queries and three blocks of 32 KB in 160 KB; blocks of 64 entries would spill registers
        block, num_warps, num_stages = 32, 8, 5
    ctas = tokens * -(-heads // tile)
    min_keys = MIN_KEYS + MORE_KEYS * ctas
    most = current_device().num_sms // ctas, _longest(args) // min_keys, MAX_SPLITS
    return TritonConfig(tile, max(min(most), 1), min_keys, block, num_warps, num_stages)


def _longest(args: CompressedAttentionArgs) -> int:
    """The entries that a token can read."""
    if args.reads is None or args.far_pages is None or args.far_table is None:
        return args.window
    if args.has_choice:
        return args.window + args.reads.shape[1]
    return args.window + args.far_table.shape[1] * (args.far_pages.shape[1] // args.pieces)


def workspace(args: CompressedAttentionArgs) -> int:
    """The states of splits, and the slots of chosen positions."""
    (tokens, heads, width), splits = args.q.shape, choose_config(args).splits
    of_splits = 4 * splits * (width + 2) * heads if splits > 1 else 0
    slots = 4 * args.reads.shape[1] if args.reads is not None and args.has_choice else 0
    return tokens * (of_splits + slots)
