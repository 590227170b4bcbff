"""The definition: tokens quantised to e4m3 in groups of 128 inputs, times an fp8 matrix.

Each token has a float32 scale for each group of ``GROUP`` inputs, which is the group's largest
magnitude over that of e4m3. So a token's values depend on that token only. Published checkpoints
with blocks of 128 x 128 weights define the same (DeepSeek-V3, arXiv:2412.19437, section 3.3); those
with a scale a row quantise a token with one scale, which is coarser.

Scales of weights are [O, 1], or [O / 128, K / 128] where blocks of 128 x 128 weights share one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.skinny_gemm.ref import swiglu

GROUP = 128  # inputs that share a scale of a token; also the sides of a block of weights
LARGEST = 448.0  # magnitude of e4m3
SMALLEST = 2.0**-100  # magnitude of a group; below it a group's scale would be denormal
SCALE_ROW = 8  # scales of a group are padded to a multiple of this number of tokens, for TMA


def scale_tokens(tokens: int) -> int:
    """The number of tokens, padded as in the array of scales."""
    return -(-tokens // SCALE_ROW) * SCALE_ROW


def quantised_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, K]
    """Values, float8_e4m3fn[T, K], and scales, float32[K / GROUP, ``scale_tokens(T)``].

    Scales of padding are 0.
    """
    tokens, inner = x.shape
    groups = jnp.asarray(x, jnp.float32).reshape(tokens, -1, GROUP)
    largest = jnp.maximum(jnp.abs(groups).max(axis=2), SMALLEST)  # [T, G]
    scaled = groups * (LARGEST / largest)[..., None]
    padding = ((0, 0), (0, scale_tokens(tokens) - tokens))
    scales = jnp.pad((largest * (1.0 / LARGEST)).T, padding)
    # Without the barrier XLA removes the conversion to e4m3 and back on a GPU.
    values = jax.lax.optimization_barrier(scaled.astype(jnp.float8_e4m3fn))
    return values.reshape(tokens, inner), scales


def dequantised_tokens(
    values: jax.Array,  # float8_e4m3fn[T, K]
    scales: jax.Array,  # float32[K / GROUP, scale_tokens(T)]
) -> jax.Array:  # float32[T, K]
    """The tokens that the result of ``quantised_tokens`` represents."""
    groups = values.astype(jnp.float32).reshape(values.shape[0], -1, GROUP)
    return (groups * scales.T[: values.shape[0], :, None]).reshape(values.shape)


def dequantised_weights(
    values: jax.Array,  # float8_e4m3fn[O, K]
    scales: jax.Array,  # float32[O, 1], or [O / GROUP, K / GROUP]
) -> jax.Array:  # float32[O, K]
    """The matrix in float32."""
    rows, groups = (n // m for n, m in zip(values.shape, scales.shape, strict=True))
    expanded = jnp.repeat(jnp.repeat(jnp.asarray(scales), rows, axis=0), groups, axis=1)
    return values.astype(jnp.float32) * expanded


def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]; of partials their sum
    """The definition: both matrices dequantised and multiplied in float32, rounded once."""
    tokens = dequantised_tokens(*quantised_tokens(args.x))
    w = dequantised_weights(args.w.values, args.w.scales)
    out = jnp.matmul(tokens, w.T, precision="highest")
    if args.bias is not None:
        out = out + jnp.asarray(args.bias, jnp.float32)
    return (swiglu(out) if args.swiglu else out).astype(args.x.dtype)
