"""Which calls the Triton kernel of sandwich_norm supports, and its launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.lib.checks import unfit_for_triton, unfit_norms
from pallas_kernels.residual_norm.launch import MAX_WIDTH
from pallas_kernels.sandwich_norm.ref import SandwichArgs

MAX_OUTPUTS, MAX_NORMS = 2, 3


def supports(args: SandwichArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    x = args.x
    if (reason := unfit_for_triton(x, x)) is not None:
        return reason
    if args.pins.of("residual_norm"):
        return "residual_norm is pinned"
    rows = (*args.output_norms, args.post, *args.norms)
    if reason := unfit_norms(x, *(row.weights for row in rows if row)):
        return reason
    if len(args.norms) > MAX_NORMS:
        return f"there are {len(args.norms)} norms, more than {MAX_NORMS}"
    tokens, width = x.shape
    if not tokens:
        return "there are no tokens"
    if width > MAX_WIDTH:
        return f"rows of {width} components are above {MAX_WIDTH}"
    return None
