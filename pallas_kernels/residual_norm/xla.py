"""residual_norm in plain XLA; supports differentiation and vmap."""

from __future__ import annotations

import jax

from pallas_kernels.lib.numerics import add_partials, rms_norm
from pallas_kernels.residual_norm.ref import NormArgs


@jax.jit  # one trace serves every layer of a step
def residual_norm(args: NormArgs) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    x = args.x if args.partials is None else add_partials(args.x, args.partials)
    return x, rms_norm(x, args.weights[args.row], args.eps)
