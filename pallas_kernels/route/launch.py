"""Which calls the Triton kernel of route supports."""

from __future__ import annotations

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.route.ref import RouteArgs

MAX_EXPERTS = 1024  # one CTA holds the scores of a token in registers


def supports_fixed(args: RouteArgs) -> str | None:
    """Why the kernel with fixed bits cannot run the call, or None."""
    if args.w.dtype != args.x.dtype:
        return f"tokens are {args.x.dtype} and the router {args.w.dtype}"
    return supports(args)


def supports(args: RouteArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None. Imports no Triton."""
    if len(args.w) > MAX_EXPERTS:
        return f"{len(args.w)} experts are more than {MAX_EXPERTS}"
    if not args.x.size:
        return "there are no tokens"
    return unfit_for_triton(args.x, args.x)
