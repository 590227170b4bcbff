"""route with logits by the native library, whose bits depend on no other token; the rest is XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native.library import missing
from pallas_kernels.route.ref import RouteArgs
from pallas_kernels.route.xla import routed
from pallas_kernels.skinny_gemm.native import matmul


def supports(args: RouteArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    if (reason := missing()) is not None:
        return reason
    if args.x.dtype != jnp.float32 or args.w.dtype != jnp.float32:
        return f"tokens are {args.x.dtype} and the router {args.w.dtype}, not float32"
    return None


def route(args: RouteArgs) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """See ``route.api``."""
    return routed(args, matmul(args.x, args.w, by_output=True), fixed=True)
