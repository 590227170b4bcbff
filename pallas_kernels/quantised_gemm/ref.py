"""The definition of quantised_gemm: dequantised and computed in float32, rounded once."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.quantised import Quantised, dequantised
from pallas_kernels.skinny_gemm.ref import swiglu


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantisedGemmArgs:
    """The arguments of ``quantised_gemm``."""

    x: jax.Array  # [T, K]
    w: Quantised  # of O outputs; with swiglu of 2 * O: gate, up
    bias: jax.Array | None = None  # [O]; not with swiglu or split
    swiglu: bool = field(default=False, metadata=STATIC)
    split: bool = field(default=False, metadata=STATIC)
    wide: bool = field(default=False, metadata=STATIC)


def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]; of partials their sum
    """See ``quantised_gemm.api``."""
    x32 = jnp.asarray(args.x, jnp.float32)
    out = jnp.matmul(x32, dequantised(args.w).T, precision="highest")
    if args.bias is not None:
        out = out + jnp.asarray(args.bias, jnp.float32)
    out = swiglu(out) if args.swiglu else out
    return out if args.wide else out.astype(args.x.dtype)
