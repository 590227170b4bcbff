"""Which calls the Hopper kernel of many tokens supports, and its tile sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_gemm.tiled import launch
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.launch import TiledConfig, TiledSizes, sizes_of

MIN_TOKENS = 65  # the other kernel computes fewer
PAIR = 2  # tiles of outputs of a CTA, one for each compute warpgroup: gate and up, or adjacent
SMEM_BYTES = 208 << 10  # of a CTA, without barriers and factors
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


def supports(*args: Any, **static: Any) -> str | None:
    """Why the kernel cannot run the call, or None; the arguments are those of the kernel."""
    x, *parts = args
    if x.shape[0] < MIN_TOKENS:
        return f"{x.shape[0]} tokens are fewer than {MIN_TOKENS}"
    few = jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype)
    if (reason := launch.supports(few, *parts, **static)) is not None:
        return reason
    if x.shape[0] % launch.MMA_TOKENS:
        return f"{x.shape[0]} tokens are not a multiple of {launch.MMA_TOKENS}"
    sizes = sizes_of(*args, **static)
    if not choose_config(sizes).fits(sizes):
        return f"{sizes.outer} outputs or {sizes.inner} inputs are not a multiple of a tile"
    return None


def result_shapes(*args: Any, **static: Any) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(*args, **static)
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.outer), jnp.bfloat16)


def choose_config(sizes: TiledSizes) -> LargeConfig:
    """The configuration for a call of these sizes."""
    block_t = 128
    span = 2 * TILE if sizes.inner % (2 * TILE) == 0 else TILE
    step_bytes = (PAIR * sizes.tile_bytes + 2 * block_t * TILE) * span // TILE
    ups_bytes = 4 * TILE * block_t * sizes.swiglu
    stages = min((SMEM_BYTES - ups_bytes) // step_bytes, MAX_STAGES)
    cluster = 2 if sizes.outer * sizes.halves % (2 * PAIR * TILE) == 0 else 1
    return LargeConfig(TiledConfig(block_t, span, PAIR, stages, 1, by_half=True), cluster)
