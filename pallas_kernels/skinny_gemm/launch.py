"""Which calls the Triton kernel of skinny_gemm takes, and how it cuts them up.

Owns: ``supports``, ``Launch``, ``choose`` (a tuned choice, else a rule). Needs no
Triton, so that a machine without it can ask. Must not know: the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.skinny_gemm.cases import CASES
from pallas_kernels.skinny_gemm.sizes import Sizes, sizes_of
from pallas_kernels.tiles import power_of_two

MOST_TOKENS = 256  # from here on a product is more arithmetic than reading
VECTOR_BYTES = 16  # that a thread loads at once
PROGRAMS = 264  # two on each multiprocessor of an H100 or H200
MOST_SPLITS = 8
TOKEN_TILES = (16, 64)  # smallest, as the matrix units want, and largest
STAGE_BYTES = 16384  # of weights


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
    arrivals: jax.Array | None,  # int32[ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del arrivals, eps
    if (reason := unfit_for_triton(x, x)) is not None:
        return reason
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
    """Columns enough for few reads of the tokens; then spans of the inner axis to fill the chip.

    Chosen from the compiler's report, not yet timed.
    """
    itemsize = jnp.dtype(sizes.dtype).itemsize
    smallest, largest = TOKEN_TILES
    block_t = min(max(power_of_two(sizes.tokens), smallest), largest)
    block_n = 64 if block_t <= 32 else 128
    if sizes.swiglu:  # as many again of the other half
        block_n //= 2
    columns = 2 * block_n if sizes.swiglu else block_n
    choice = Launch(block_t, block_n, STAGE_BYTES // (columns * itemsize), 1)
    rows, columns = choice.tiles(sizes)
    blocks = -(-sizes.inner // choice.block_k)
    splits = max(1, min(PROGRAMS // (rows * columns), blocks // 2, MOST_SPLITS))
    return replace(choice, splits=splits)


def choose(sizes: Sizes, can_split: bool) -> Launch:
    """The tuned choice for a call of these sizes on this device, else that of the rule."""
    choice = tuned.lookup("skinny_gemm", CASES, lambda case: case.sizes, sizes)
    found = Launch(**choice) if choice else by_rule(sizes)
    return found if can_split else replace(found, splits=1)
