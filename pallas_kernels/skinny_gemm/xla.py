"""skinny_gemm in plain XLA: for any number of tokens; every result is rounded to the dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.skinny_gemm.ref import GemmArgs


def skinny_gemm(args: GemmArgs) -> jax.Array:  # [T, O]; XLA chooses split-K itself, and sums
    """See ``skinny_gemm.api``."""
    # By default XLA rounds float32 to TF32 for the tensor cores of a GPU.
    precision = "highest" if args.x.dtype == jnp.float32 else None
    w = args.w.T if args.by_output else args.w
    dtype = jnp.float32 if args.wide else None
    return activated(args, jnp.matmul(args.x, w, precision=precision, preferred_element_type=dtype))


def activated(args: GemmArgs, out: jax.Array) -> jax.Array:  # [T, O]
    """The result of the matmul after the bias or the activation, if there is one."""
    if args.bias is not None:
        return out + args.bias
    if args.gelu:
        gate, up = jnp.split(out, 2, axis=-1)
        return jax.nn.gelu(gate, approximate=True) * up
    return swiglu(out) if args.swiglu else out


def swiglu(columns: jax.Array) -> jax.Array:  # [..., 2 * O]: gate, up -> [..., O]
    """SiLU of the gates times the ups, rounded to their dtype."""
    gate, up = jnp.split(columns, 2, axis=-1)
    return jax.nn.silu(gate) * up
