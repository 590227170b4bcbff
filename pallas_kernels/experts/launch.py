"""Which calls the Hopper kernels of experts support, their tile sizes, and the tiles of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import not_hopper, without_triton
from pallas_kernels.experts.ref import NUM_ARRAYS
from pallas_kernels.experts.stack import PLAIN, Activation, size_of
from pallas_kernels.experts.tiles import max_tiles

TILE = 64  # M of a wgmma, and the inputs of a swizzled tile
MMA_TOKENS = 8  # multiple of N of a wgmma
ITEM_BYTES = 2
SMEM_BYTES = 224 << 10  # of an SM, without barriers
DTYPES = ("bfloat16", "float16")
FEW_TOKENS = 64  # at most so many are multiplied by ``decode``
ALL_TOKENS = 64  # at most so many are all multiplied by every expert in use
MAX_STAGES = 8
MMA_COLUMNS = 256  # largest N of a wgmma
STORED_COLUMNS = 128  # of a prompt's results in shared memory at once
FEW_ROWS = 8, 16  # of a tile of few tokens
WIDTHS = 64, 128  # rows of a prompt's tile
MANY_ROWS = 48  # of an expert on average, from which tiles are wide
TILES_TOGETHER = 8  # tiles of rows whose blocks are computed at a time
STEP_BYTES = 40 << 10  # of a decode step's copies, at most


def width_of(tokens: int, chosen: int, experts: int) -> int:
    """Rows of a tile."""
    if tokens <= FEW_TOKENS:
        return FEW_ROWS[tokens > FEW_ROWS[0]]
    return WIDTHS[tokens * chosen > MANY_ROWS * experts]


class GemmSizes(NamedTuple):
    """The sizes of one of the two GEMMs."""

    experts: int
    inner: int  # K
    outer: int  # O, of each half
    halves: int  # 2: gate and up; 1: down
    tokens: int  # T
    chosen: int  # k
    tiles: int  # N
    width: int  # rows of a tile
    all_tokens: bool  # of gate_up: x are the tokens, not sorted rows
    activation: Activation | None  # of gate_up
    dtype: str

    @property
    def pairs(self) -> int:
        """Tokens with one of their choices each."""
        return self.tokens * self.chosen

    @property
    def columns(self) -> int:
        """Tokens that are multiplied at once."""
        return -(-self.tokens // MMA_TOKENS) * MMA_TOKENS if self.all_tokens else self.width

    @property
    def few(self) -> bool:
        """True if ``decode`` multiplies, else ``prompt``."""
        return self.tokens <= FEW_TOKENS

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Rows of tiles; for few tokens the result of down: weighted outputs of each choice."""
        if self.halves == 2 or not self.few:
            return jax.ShapeDtypeStruct((self.tiles * self.width, self.outer), self.dtype)
        return jax.ShapeDtypeStruct((self.chosen, self.tokens, self.outer), jnp.float32)


def sizes_of(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
) -> tuple[GemmSizes, GemmSizes]:
    """The sizes of both GEMMs of a call of the op."""
    (tokens, chosen), width = choices.shape, x.shape[1]
    experts, hidden, _ = size_of(kinds[0], arrays[:NUM_ARRAYS])
    rows = width_of(tokens, chosen, experts)
    tiles = max_tiles(choices.size, experts, rows)
    common: Any = (tokens, chosen, tiles, rows)
    gate_up = GemmSizes(
        experts, width, hidden // 2, 2, *common, tokens <= ALL_TOKENS, activation, str(x.dtype)
    )
    down = GemmSizes(experts, hidden // 2, width, 1, *common, False, None, str(x.dtype))
    return gate_up, down


def supports(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
    split: bool,
) -> str | None:
    """Why the Hopper kernels cannot run the call, or None."""
    del weights, split
    if kinds != (PLAIN, PLAIN):
        return f"weights are {kinds[0]} and {kinds[1]}, not floats"
    if str(x.dtype) not in DTYPES:
        return f"tokens are {x.dtype}, not one of {', '.join(DTYPES)}"
    gate_up, down = sizes_of(x, choices, *arrays, kinds=kinds, activation=activation)
    if gate_up.inner % TILE or down.inner % TILE:
        return f"{gate_up.inner} or {down.inner} components are not a multiple of {TILE}"
    if not choices.size:
        return "there are no tokens"
    return without_triton() or not_hopper()


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of ``decode``: a CTA computes ``block_n`` outputs (of gate_up as many gates and
    ups), 64 in each of the compute ``warpgroups``, in K steps of ``block_k`` inputs, of which
    ``stages`` are in flight.
    """

    block_k: int
    stages: int
    warpgroups: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a CTA's item."""
        return TILE * self.warpgroups

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        divides = sizes.inner % self.block_k == 0 and sizes.outer % self.block_n == 0
        return divides and self.block_k % TILE == 0 and self.stages >= 2


def decode_config(sizes: GemmSizes) -> DecodeConfig:
    """One wide step is a few large copies; as many of them as shared memory holds."""
    warpgroups = 2 if sizes.columns > 32 and sizes.outer % (2 * TILE) == 0 else 1
    input_bytes = (sizes.halves * TILE * warpgroups + sizes.columns) * ITEM_BYTES
    most = max(1, STEP_BYTES // (TILE * input_bytes))
    steps = sizes.inner // TILE
    block_k = TILE * max(n for n in range(1, min(most, 4) + 1) if steps % n == 0)
    stages = SMEM_BYTES // (block_k * input_bytes)
    return DecodeConfig(block_k, max(2, min(stages, MAX_STAGES)), warpgroups)


@dataclass(frozen=True)
class PromptConfig:
    """Tile sizes of ``prompt``: a CTA computes ``block_n`` outputs (of gate_up as many gates and
    ups) of a tile of rows in K steps of ``block_k`` inputs, of which ``stages`` are in flight. The
    blocks of ``group`` tiles are computed at a time.
    """

    block_n: int
    block_k: int
    stages: int
    group: int = TILES_TOGETHER

    @property
    def store_n(self) -> int:
        """Columns of results in shared memory at once."""
        return math.gcd(self.block_n, STORED_COLUMNS)

    @property
    def lanes(self) -> int:
        """Columns of a swizzled tile of results."""
        return math.gcd(self.store_n, TILE)

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        divides = sizes.inner % self.block_k == 0 and sizes.outer % self.block_n == 0
        columns = self.block_n * sizes.halves <= MMA_COLUMNS and self.block_n % MMA_TOKENS == 0
        rows = sizes.width in WIDTHS and self.block_k % TILE == 0
        return divides and columns and rows and self.stages >= 2


def prompt_config(sizes: GemmSizes) -> PromptConfig:
    """As many columns as a wgmma has, and as many stages as shared memory holds."""
    most = MMA_COLUMNS // sizes.halves
    block_n = max(n for n in range(32, most + 1, 32) if sizes.outer % n == 0)
    step_bytes = (sizes.width + sizes.halves * block_n) * TILE * ITEM_BYTES
    config = PromptConfig(block_n, TILE, 2)
    out_bytes = sizes.width * config.store_n * ITEM_BYTES
    stages = min((SMEM_BYTES - out_bytes) // step_bytes, MAX_STAGES)
    return PromptConfig(block_n, TILE, stages)
