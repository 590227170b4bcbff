"""Which calls the Mosaic kernel of swiglu_gemm supports, and its tile sizes.

Owns: ``supports``, ``result_shapes``, ``SwigluConfig``, ``choose_config`` (the tuned one, else
that of a heuristic).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import jax

from pallas_kernels.harness import tuned
from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.device import current_device
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm.cases import CASES, SwigluCase

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
MIN_TOKENS = 128  # of a tile; at 128 and 256 as fast as XLA's GEMM and SwiGLU, and can be linked
LANES, MIN_LANES = 64, 32  # width of a swizzled tile in shared memory, in values
TOKEN_MULTIPLE = 8  # rows of a swizzled tile, which TMA copies whole
MMA_TOKENS = 64  # M of a wgmma
MMA_COLUMNS = 256  # largest N of a wgmma
COMPUTE_WARPGROUPS = 2  # each has half of a tile's tokens
MAX_ACC_VALUES = 128 * 320  # float32 of a tile: 160 of the 232 registers of a compute thread
SMEM_BYTES = 225 << 10  # of an SM, without barriers
LARGE_LEAD, SMALL_LEAD = 1, 2  # K steps; without a lead 2 % slower on an H200


class SwigluSizes(NamedTuple):
    """Shape of a call: [T, I] @ [I, 2 * O]."""

    tokens: int
    inner: int
    outer: int


@dataclass(frozen=True)
class SwigluConfig:
    """Tile sizes and schedule.

    A CTA computes tiles of ``block_t`` tokens and ``block_n`` columns, from ``block_n`` gates and
    ``block_n`` ups, in K steps of ``block_k`` inner components, of which ``stages`` are in flight.
    ``cluster`` CTAs, 1 or 2, take adjacent tokens and load the weights by multicast. Tiles that are
    computed at the same time are adjacent, ``group`` of them along the tokens, for reuse in L2. The
    first compute warpgroup is ``lead`` steps ahead, so its epilogue overlaps the second's matmuls.
    """

    block_t: int
    block_n: int
    block_k: int
    stages: int
    cluster: int
    group: int
    lead: int = 0

    @property
    def lanes(self) -> int:
        """Width of a swizzled tile in shared memory, in values."""
        return math.gcd(self.block_n, LANES)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA for tokens, weights and results."""
        step = (self.block_t + 2 * self.block_n) * self.block_k
        return (self.stages * step + self.block_t * self.block_n) * ITEM_BYTES

    def fits(self, sizes: SwigluSizes) -> bool:
        """True if the kernel can run a call of these sizes with this configuration."""
        divides = sizes.inner % self.block_k == 0
        lanes = self.lanes >= MIN_LANES and self.block_k % self.lanes == 0
        rows = self.block_t % (MMA_TOKENS * COMPUTE_WARPGROUPS) == 0
        accs = self.block_t * 2 * self.block_n <= MAX_ACC_VALUES
        smem = self.smem_bytes <= SMEM_BYTES and self.stages >= 2
        # If the first warpgroup were a whole tile ahead, the second would miss its barrier phase.
        lead = not self.lead or self.lead < self.stages <= sizes.inner // self.block_k
        return divides and lanes and rows and accs and smem and lead and self.cluster in (1, 2)


def sizes_of(args: GemmArgs) -> SwigluSizes:
    """The sizes of a call's arguments."""
    tokens, inner = args.x.shape
    return SwigluSizes(tokens, inner, args.w.shape[1] // 2)


def supports(args: GemmArgs) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    sizes, dtype = sizes_of(args), args.x.dtype
    if str(dtype) not in DTYPES or args.w.dtype != dtype:
        return f"tokens are {dtype} and weights {args.w.dtype}, not the same 16-bit dtype"
    if sizes.tokens < MIN_TOKENS:
        return f"{sizes.tokens} tokens are below {MIN_TOKENS}"
    if sizes.tokens % TOKEN_MULTIPLE:
        return f"{sizes.tokens} tokens are not a multiple of {TOKEN_MULTIPLE}"
    if sizes.inner % LANES or sizes.outer % LANES:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {LANES}"
    return not_hopper()


def result_shapes(args: GemmArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(args)
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.outer), args.x.dtype)


LARGE = SwigluConfig(128, 128, LANES, 4, 1, 1)
SMALL = SwigluConfig(128, 64, LANES, 6, 2, 1)
WIDE = SwigluConfig(128, 160, LANES // 2, 6, 2, 1)  # 256 tokens of Qwen3-4B: one wave of 122 CTAs
NARROW = SwigluConfig(128, 96, LANES, 5, 1, 1)  # 128 tokens of it: one wave of 102
# Relative time of a column. Timed on an H200: large tiles in clusters of two are 1 % slower than
# without clusters, small ones without clusters 20 % slower than with. At 256 rows a wave of wide
# tiles takes 49.8 us, of small tiles 17.8: with 32 lanes TMA requests more lines than with 64, and
# 16 lanes took twice as long.
COLUMN_COSTS = MappingProxyType({LARGE: 1.0, SMALL: 1.04, WIDE: 1.15, NARROW: 1.25})


def heuristic_config(sizes: SwigluSizes) -> SwigluConfig:
    """The tiles with the least time, estimated as waves times the time of a tile."""
    fitting = [config for config in COLUMN_COSTS if config.fits(sizes)]
    best = min(fitting, key=lambda c: _waves(c, sizes) * c.block_n * COLUMN_COSTS[c])
    leads = _waves(best, sizes) > 1 and sizes.inner // best.block_k >= best.stages
    lead = SMALL_LEAD if best is SMALL else LARGE_LEAD
    return replace(best, group=_group(best), lead=lead if leads else 0)


def _waves(config: SwigluConfig, sizes: SwigluSizes) -> int:
    along_tokens = -(-sizes.tokens // (config.block_t * config.cluster))
    tiles = along_tokens * -(-sizes.outer // config.block_n)
    return -(-tiles // (current_device().num_sms // config.cluster))


def _group(config: SwigluConfig) -> int:
    """Tiles along the tokens such that a wave reads about as many tokens as weight columns."""
    tiles = current_device().num_sms // config.cluster
    square = tiles * 2 * config.block_n / (config.block_t * config.cluster)
    return 2 ** round(math.log2(square) / 2)


def shapes_of(case: SwigluCase) -> SwigluSizes:
    """The key of a case's tuned choice."""
    return SwigluSizes(case.tokens, case.inner, case.outer)


def choose_config(sizes: SwigluSizes) -> SwigluConfig:
    """The tuned config for a call of these sizes on this device, else the heuristic one."""
    choice = tuned.lookup("swiglu_gemm", CASES, shapes_of, sizes)
    return SwigluConfig(**choice) if choice else heuristic_config(sizes)
