"""residual_norm by the native library, in float32.

XLA makes four fusions of each, which are 58 of the 140 instructions of a quantised layer; an
executable holds 5 KB for each instruction (docs/notes/0023-memory-on-a-cpu.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.library import RESIDUAL_NORM, call, missing
from pallas_kernels.residual_norm.ref import NormArgs


def supports(args: NormArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    x, partials = args.x, args.partials
    if (reason := missing()) is not None:
        return reason
    if x.dtype != jnp.float32 or args.weights.dtype != jnp.float32:
        return f"tokens are {x.dtype} and weights {args.weights.dtype}, not float32"
    if partials is not None and partials.ndim == 3:
        return "there are split-K partials"
    return None


def residual_norm(args: NormArgs) -> tuple[jax.Array, jax.Array]:  # 2 * float32[T, D]
    """See ``residual_norm.api``."""
    x, partials = args.x, args.partials
    summed = (0, 0) if partials is None else x.shape
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (summed, x.shape)]
    static = {"row": np.int64(args.row), "eps": np.float32(args.eps)}
    total, normed = call(RESIDUAL_NORM, results, x, partials, args.weights, **static)
    return x if partials is None else total, normed
