"""skinny_gemm by the native library, in float32: for batches whose rows must not change its bits.

A sum has one order, which depends on the weights' shape alone: neither on the number of tokens nor
on a token's place among them. XLA's matmuls choose theirs by both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native.library import FIXED_GEMM, call, missing
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.skinny_gemm.xla import activated


def supports(args: GemmArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    if (reason := missing()) is not None:
        return reason
    if args.x.dtype != jnp.float32 or args.w.dtype != jnp.float32:
        return f"tokens are {args.x.dtype} and weights {args.w.dtype}, not float32"
    return None


def skinny_gemm(args: GemmArgs) -> jax.Array:  # float32[T, O]
    """See ``skinny_gemm.api``."""
    return activated(args, matmul(args.x, args.w, by_output=args.by_output))


def matmul(
    x: jax.Array,  # float32[T, I]
    w: jax.Array,  # float32[I, O], or by output [O, I]
    *,
    by_output: bool = False,
) -> jax.Array:  # float32[T, O]
    """The matmul alone."""
    result = jax.ShapeDtypeStruct((len(x), w.shape[0 if by_output else 1]), jnp.float32)
    return call(FIXED_GEMM, result, x, w, by_output=by_output)
