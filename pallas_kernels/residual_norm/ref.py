"""The definition of residual_norm: partials are added one by one in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NormArgs:
    """The arguments of ``residual_norm``."""

    x: jax.Array  # [T, D]
    partials: jax.Array | None = None  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array  # [W, D]
    row: int = field(metadata=STATIC)
    eps: float = field(metadata=STATIC)


def residual_norm(args: NormArgs) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """The sum is rounded to its dtype before it is normalised, as models do."""
    x = jnp.asarray(args.x)
    if args.partials is not None:
        total = jnp.zeros(x.shape, jnp.float32)
        for partial in jnp.reshape(jnp.asarray(args.partials, jnp.float32), (-1, *x.shape)):
            total += partial
        x = (x.astype(jnp.float32) + total).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    rms = jnp.sqrt((x32 * x32).mean(-1, keepdims=True) + args.eps)
    return x, (x32 / rms * jnp.asarray(args.weights[args.row], jnp.float32)).astype(x.dtype)
