"""Which calls the Triton kernels of latent_prefill support, their tile sizes and splits.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two

MIN_TILE = 16  # of tl.dot, in every dimension
MAX_DIM, MAX_RANK = 128, 512
# A CTA reads all of query_start_loc at once, padded to at least this: see ``paged_prefill.launch``
STARTS_TILE = 512
FEW_STARTS_TILE = 64  # as STARTS_TILE, of few queries
FEW_TOKENS = 256  # see ``paged_prefill.ref``
MAX_SPLITS = 16
# Of a split, if a context has as many: absorbing queries and expanding values, which each split
# does, takes as long as 128 keys.
MIN_KEYS = 256


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters of a kernel; ``tokens`` and ``block`` are powers of two."""

    tokens: int  # queries of a CTA, of one head
    block: int  # keys per loop iteration
    num_warps: int
    num_stages: int

    def parameters(self) -> dict[str, Any]:
        """The launch parameters of a kernel."""
        sizes = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return sizes | {"TOKENS": self.tokens, "BLOCK": self.block}


@dataclass(frozen=True)
class TritonConfigs:
    """The configs of the two kernels."""

    chunk: TritonConfig
    context: TritonConfig


@dataclass(frozen=True)
class SplitConfig:
    """The launch with splits of what precedes the step.

    ``splits``: of a tile at most, a power of two; ``ctas``: of each head, one for each SM.
    """

    tiles: TritonConfigs
    splits: int
    ctas: int


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


def split_config(args: LatentPrefillArgs) -> SplitConfig:
    """As many splits as fill the GPU if a single tile of each head has queries.

    With one split, ``split_supports`` refuses the call.
    """
    heads, keys = args.q.shape[1], args.page_table.shape[1] * args.pages.shape[1]
    ctas = max(current_device().num_sms // heads, 1)
    splits = max(min(ctas, keys // MIN_KEYS, MAX_SPLITS), 1)
    return SplitConfig(_split_tiles(args), power_of_two(splits + 1) // 2, ctas)


def _split_tiles(args: LatentPrefillArgs) -> TritonConfigs:
    """The tiles of a chunk have no more queries than those of what precedes it."""
    tiles = choose_configs(args.q, scaled=args.scales is not None)
    if args.q.dtype.itemsize > 2:
        return tiles
    # with three stages of 8-bit blocks registers would spill
    context = TritonConfig(64, 32, 8, 2) if args.scales is not None else tiles.context
    return TritonConfigs(TritonConfig(64, 64, 4, 3), context)


def most_items(config: SplitConfig, tokens: int, rows: int) -> int:
    """The largest number of pairs of a tile and a split that rows of so many queries have.

    A row has no more splits than CTAs, unless it has more tiles.
    """
    tiles = tokens // config.tiles.context.tokens + rows
    return min(tiles * config.splits, tiles + rows * config.ctas)


def split_supports(args: LatentPrefillArgs) -> str | None:
    """Why the Triton kernels with splits cannot run the call or gain nothing, or None."""
    if reason := supports(args):
        return reason
    if args.q.shape[0] > FEW_TOKENS:
        return f"{args.q.shape[0]} queries are more than {FEW_TOKENS}"
    if split_config(args).splits == 1:
        return f"contexts have less than {2 * MIN_KEYS} keys, or heads fill the GPU"
    return None


def split_workspace(args: LatentPrefillArgs) -> int:
    """The bytes of the states of all splits."""
    t, n, _ = args.q.shape
    return 4 * split_config(args).splits * t * n * (args.v_up.shape[0] // n + 1)
