"""quantised_gemm in plain XLA, for any number of tokens.

The matrix is dequantised at each call, rounded to the tokens' dtype and multiplied. Every result is
rounded to that dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.lib.quantised import dequantised
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.skinny_gemm.xla import swiglu


def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]; XLA chooses split-K itself
    """See ``quantised_gemm.api``."""
    x = args.x
    w = dequantised(args.w).astype(x.dtype)
    # By default XLA rounds float32 to TF32 for the tensor cores of a GPU.
    precision = "highest" if x.dtype == jnp.float32 else None
    dtype = jnp.float32 if args.wide else x.dtype
    out = jnp.matmul(x, w.T, precision=precision, preferred_element_type=dtype)
    if args.bias is not None:
        return out + args.bias
    return swiglu(out) if args.swiglu else out
