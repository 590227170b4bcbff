"""The definition of skinny_gemm: computed in float32, rounded once."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GemmArgs:
    """The arguments of ``skinny_gemm``, and with ``swiglu`` those of ``swiglu_gemm``."""

    x: jax.Array  # [T, I]
    w: jax.Array  # [I, O], or by output [O, I]; with swiglu [I, 2 * O]: gate, up
    bias: jax.Array | None = None  # [O]; not with swiglu
    swiglu: bool = field(default=False, metadata=STATIC)
    gelu: bool = field(default=False, metadata=STATIC)  # with swiglu: GELU instead of SiLU
    split: bool = field(default=False, metadata=STATIC)
    by_output: bool = field(default=False, metadata=STATIC)
    wide: bool = field(default=False, metadata=STATIC)  # the result is float32


def skinny_gemm(args: GemmArgs) -> jax.Array:  # [T, O]; partials are defined by their sum
    """See ``skinny_gemm.api``."""
    x32, w32 = jnp.asarray(args.x, jnp.float32), jnp.asarray(args.w, jnp.float32)
    out = jnp.matmul(x32, w32.T if args.by_output else w32, precision="highest")
    if args.bias is not None:
        out = out + jnp.asarray(args.bias, jnp.float32)
    if args.gelu:
        out = geglu(out)
    elif args.swiglu:
        out = swiglu(out)
    return out if args.wide else out.astype(args.x.dtype)


def geglu(columns: jax.Array) -> jax.Array:  # float32[T, 2 * O]: gate, up -> [T, O]
    """GELU of the gates, with its approximation by tanh, times the ups (Shazeer, 2020)."""
    gate, up = jnp.split(columns, 2, axis=1)
    inner = (2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1.0 + jnp.tanh(inner)) / 2 * up


def swiglu(columns: jax.Array) -> jax.Array:  # float32[T, 2 * O]: gate, up -> [T, O]
    """SiLU of the gates times the ups (Shazeer, 2020, arXiv:2002.05202)."""
    gate, up = jnp.split(columns, 2, axis=1)
    return gate / (1.0 + jnp.exp(-gate)) * up
