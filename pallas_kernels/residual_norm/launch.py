"""Which calls the Triton kernel of residual_norm supports, and its launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.lib.checks import unfit_for_triton, unfit_norms
from pallas_kernels.residual_norm.ref import NormArgs

MAX_WIDTH = 8192  # wider rows would spill registers; ``all_reduce.launch`` has memory for these
COMPONENTS_PER_WARP = 256  # 16 bytes a thread of 16-bit values
MAX_WARPS = 16
MAX_VALUES_IN_FLIGHT = 64  # of partials a thread, each in a register


def supports(args: NormArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    x = args.x
    if (reason := unfit_for_triton(x, x)) is not None:
        return reason
    if (reason := unfit_norms(x, args.weights)) is not None:
        return reason
    tokens, width = x.shape
    if not tokens:
        return "there are no tokens"
    if width > MAX_WIDTH:
        return f"rows of {width} components are above {MAX_WIDTH}"
    return None


def num_warps(tile: int) -> int:
    """Warps such that a thread loads a partial in one or two loads; others were not timed."""
    return min(max(tile // COMPONENTS_PER_WARP, 1), MAX_WARPS)


def loads_in_flight(partials: int, tile: int) -> int:
    """Partials whose loads are in flight at the same time, limited by registers."""
    values = max(tile // (32 * num_warps(tile)), 1)  # of a partial, in a thread
    return min(max(partials, 1), MAX_VALUES_IN_FLIGHT // values)
