"""Which calls the Triton kernel of residual_norm takes, and how a row is cut up.

Needs no Triton, so that a machine without it can ask.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton

LARGEST_WIDTH = 8192  # wider rows need more registers than there are
COMPONENTS = 256  # of a warp: 16 bytes a thread of 16-bit values
MOST_WARPS = 16
MOST_VALUES = 64  # of parts that a thread holds at once, each in a register


def supports(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del parts, row, eps
    if (reason := unfit_for_triton(x, x)) is not None:
        return reason
    if weights.dtype != x.dtype:
        return f"the weights are {weights.dtype}, not {x.dtype}"
    tokens, width = x.shape
    if not tokens:
        return "there are no tokens"
    if width > LARGEST_WIDTH:
        return f"rows of {width} components are above {LARGEST_WIDTH}"
    return None


def warps(tile: int) -> int:
    """Enough that a thread's loads of a part are one or two; others were not timed."""
    return min(max(tile // COMPONENTS, 1), MOST_WARPS)


def together(parts: int, tile: int) -> int:
    """Parts whose loads are under way at once: as many as there are registers for."""
    values = max(tile // (32 * warps(tile)), 1)  # of a thread
    return min(max(parts, 1), MOST_VALUES // values)
