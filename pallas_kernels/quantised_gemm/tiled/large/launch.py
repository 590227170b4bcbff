"""Which calls the Hopper kernel of many tokens supports, and its tile sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lib.device import current_device
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled import launch
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.launch import (
    INTEGER_KINDS,
    TiledConfig,
    TiledSizes,
    sizes_of,
)

MIN_TOKENS = launch.MAX_TOKENS + 1
BLOCK_TOKENS = 64, 96, 128, 160  # of a tile; more need too many registers
MOST_TOKENS = (128, 160), (32, 128), (16, 96)  # groups of at least so many inputs, without spills
STEP_TOKENS = 48  # tokens that take as long as a K step's work for each tile
PAIR = 2  # tiles of outputs of a CTA, one for each compute warpgroup: gate and up, or adjacent
SMEM_BYTES = 225 << 10  # of a CTA, without barriers
MAX_STAGES = 6


@dataclass(frozen=True)
class LargeConfig:
    """Tile sizes and schedule.

    ``step`` describes a K step: ``block_t`` tokens, ``span`` inputs, one tile of weights for each
    compute warpgroup. ``cluster`` CTAs, 1 or 2, take adjacent outputs and load the tokens by
    multicast. Tiles that are computed at the same time are adjacent, ``group`` of them along the
    tokens, for reuse in L2.
    """

    step: TiledConfig
    cluster: int = 1
    group: int = 8

    def fits(self, sizes: TiledSizes) -> bool:
        """True if the tiles divide a call of these sizes; shared memory is not checked."""
        outputs = sizes.outer * sizes.halves
        whole = self.step.by_half and self.step.warpgroups == PAIR and self.step.split_k == 1
        fits = replace(self.step, by_half=False, warpgroups=1).fits(sizes)
        return whole and fits and outputs % (PAIR * self.cluster * TILE) == 0


def supports(args: QuantisedGemmArgs) -> str | None:
    """Why the kernel cannot run the call, or None."""
    tokens, inner = args.x.shape
    if args.wide:
        return "the result is bfloat16"
    if tokens < MIN_TOKENS:
        return f"{tokens} tokens are fewer than {MIN_TOKENS}"
    few: Any = jax.ShapeDtypeStruct((1, inner), args.x.dtype)
    if (reason := launch.supports(replace(args, x=few))) is not None:
        return reason
    if tokens % launch.MMA_TOKENS:
        return f"{tokens} tokens are not a multiple of {launch.MMA_TOKENS}"
    sizes = sizes_of(args)
    if not choose_config(sizes).fits(sizes):
        return f"{sizes.outer} outputs or {sizes.inner} inputs are not a multiple of a tile"
    return None


def result_shapes(args: QuantisedGemmArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(args)
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.outer), jnp.bfloat16)


def choose_config(sizes: TiledSizes) -> LargeConfig:
    """The configuration whose tiles take the shortest time.

    On an H100 a K step of 128 inputs takes about 0.005 us * (48 + ``block_t``), so larger tiles are
    faster unless the last ones leave SMs without work.
    """
    scales = sizes.kind in INTEGER_KINDS and sizes.block == 1
    whole = sizes.inner % (2 * TILE) == 0 and (scales or sizes.group >= TILE)
    span = 2 * TILE if whole else TILE  # with more and smaller groups registers are spilled
    most = next(tokens for group, tokens in MOST_TOKENS if scales or sizes.group >= group)
    pairs = sizes.outer * sizes.halves // (PAIR * TILE)
    cluster = 2 if pairs % 2 == 0 else 1

    def cost(block_t: int) -> int:
        tiles = -(-sizes.tokens // block_t) * pairs // cluster
        waves = -(-tiles // (current_device().num_sms // cluster))
        return waves * (STEP_TOKENS + block_t)

    block_t = min((tokens for tokens in BLOCK_TOKENS if tokens <= most), key=cost)
    step = TiledConfig(block_t, span, PAIR, 2, 1, by_half=True, scales=scales)
    stages = min((SMEM_BYTES - ups_bytes(sizes, step)) // step_bytes(sizes, step), MAX_STAGES)
    return LargeConfig(replace(step, stages=stages), cluster)


def ups_bytes(sizes: TiledSizes, step: TiledConfig) -> int:
    """Shared memory through which ups are passed."""
    return 4 * TILE * step.block_t * sizes.swiglu


def step_bytes(sizes: TiledSizes, step: TiledConfig) -> int:
    """Shared memory of a K step, with four bytes for each factor."""
    values = PAIR * sizes.tile_bytes * step.span // TILE
    tokens = 2 * step.block_t * step.span
    factors = PAIR * TILE * 4 * (1 + sizes.zeros + sizes.offsets + 2 * bool(sizes.super_group))
    sums = 4 * step.block_t * (sizes.offsets and not step.scales)
    return values + tokens + (factors + sums) * step.rows(sizes.group)
