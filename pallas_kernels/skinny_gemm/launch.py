"""Which calls the Triton kernel of skinny_gemm takes, and how it cuts them up.

Owns: ``supports``, ``Launch``, ``choose`` (a tuned choice, else a rule). Needs no
Triton, so that a machine without it can ask. Must not know: the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase
from pallas_kernels.skinny_gemm.sizes import Sizes, sizes_of
from pallas_kernels.tiles import power_of_two

MOST_TOKENS = 256  # from here on a product is more arithmetic than reading
VECTOR_BYTES = 16  # that a thread loads at once
TOKEN_TILES = (16, 128)  # smallest, as the matrix units want, and largest
STAGE_BYTES = 16384  # of weights
MOST_SPLITS = 8
PARTIAL_BYTES = 4
STAGES = (3, 7)
WGMMA_TOKENS = 64  # smallest tile of the matrix units that read from shared memory by themselves
MULTIPROCESSORS = 132  # of an H100 or H200
SHARED_BYTES = 220 << 10  # of a multiprocessor, less what the compiler takes besides stages
MOST_TOGETHER = 3  # programs of a multiprocessor that stages leave room for


@dataclass(frozen=True)
class Launch:
    """How a call is cut up. Blocks (tokens, columns of the result, inner) are powers of two."""

    block_t: int
    block_n: int
    block_k: int
    splits: int  # of the inner axis
    num_warps: int = 4
    num_stages: int = 5

    def tiles(self, sizes: Sizes) -> tuple[int, int]:
        """Tiles of the result, over tokens and over columns."""
        return -(-sizes.tokens // self.block_t), -(-sizes.outer // self.block_n)


def supports(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    arrivals: jax.Ref | None,  # int32[>= ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
    parts: int,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del arrivals, eps
    if (reason := unfit_for_triton(x, x)) is not None:
        return reason
    if parts > 1:
        return "it writes sums whole, not in parts"
    sizes = sizes_of(x, w, norm, swiglu)
    if any(str(y.dtype) != sizes.dtype for y in (w, norm, residual) if y is not None):
        return f"the arguments are not all {sizes.dtype}"
    if not 1 <= sizes.tokens <= MOST_TOKENS:
        return f"{sizes.tokens} tokens are not between 1 and {MOST_TOKENS}"
    vector = VECTOR_BYTES // x.dtype.itemsize
    if sizes.inner % vector or sizes.outer % vector:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {vector}"
    if w.size >= 1 << 31:
        return f"weights {w.shape} have offsets past 32 bits"
    if norm is not None and sizes.dtype == "float16":
        return "float16 may overflow where it holds weighted tokens that are not yet normalised"
    return None


def by_rule(sizes: Sizes) -> Launch:
    """Columns enough for few reads of the tokens. Not yet timed."""
    return of_columns(64 if _token_tile(sizes) <= 32 else 128, sizes)


def _token_tile(sizes: Sizes) -> int:
    smallest, largest = TOKEN_TILES
    return min(max(power_of_two(sizes.tokens), smallest), largest)


def of_columns(columns: int, sizes: Sizes) -> Launch:
    """The rule's launch of blocks that many columns of weights wide, gate and up together.

    Splits are by ``_blocks_of_time``, stages as many as leave room for all programs at once.
    """
    itemsize, block_t = jnp.dtype(sizes.dtype).itemsize, _token_tile(sizes)
    block_k = STAGE_BYTES // (columns * itemsize)
    block_n = columns // 2 if sizes.swiglu else columns
    choice = Launch(block_t, block_n, block_k, 1, num_warps=8 if block_t > 64 else 4)
    choices = (replace(choice, splits=splits) for splits in range(1, MOST_SPLITS + 1))
    choice = min(choices, key=lambda choice: _blocks_of_time(choice, sizes))
    room = SHARED_BYTES // min(_programs_together(choice, sizes), MOST_TOGETHER)
    stages = room // ((columns + block_t) * block_k * itemsize)
    stages += block_t < WGMMA_TOKENS  # whose products leave one of the stages without a buffer
    return replace(choice, num_stages=min(max(stages, STAGES[0]), STAGES[1]))


def _programs_together(choice: Launch, sizes: Sizes) -> int:
    """Programs of the multiprocessor that has the most."""
    return -(-math.prod(choice.tiles(sizes)) * choice.splits // MULTIPROCESSORS)


def _blocks_of_time(choice: Launch, sizes: Sizes) -> float:
    """Blocks of weights, and partial sums counted in such blocks, that one multiprocessor moves.

    Infinite for splits that have to wait for room.
    """
    span = -(-sizes.inner // (choice.block_k * choice.splits))
    together = _programs_together(choice, sizes)
    if choice.splits == 1:
        return together * span
    if together > MOST_TOGETHER:
        return math.inf
    halves = 2 if sizes.swiglu else 1
    partial = halves * choice.block_t * choice.block_n * PARTIAL_BYTES / STAGE_BYTES
    return together * (span + partial) + choice.splits * partial


def _alike(sizes: Sizes) -> Sizes:
    """The sizes that stand for all whose tokens fill the same tile."""
    return sizes._replace(tokens=max(power_of_two(sizes.tokens), TOKEN_TILES[0]))


def shapes_of(case: GemmCase) -> Sizes:
    """What ``choose`` knows of a case's call."""
    return _alike(case.sizes)


def choose(sizes: Sizes) -> Launch:
    """The tuned choice for a call of about these sizes on this device, else that of the rule."""
    choice = tuned.lookup("skinny_gemm", CASES, shapes_of, _alike(sizes))
    return Launch(**choice) if choice else by_rule(sizes)
