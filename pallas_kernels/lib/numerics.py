"""Formulas shared by models and ops.

Statistics and angles are float32 whatever the dtype; results keep the input's dtype.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.lib.device import current_device
from pallas_kernels.native.library import FIXED_GEMM, call

# The values of attention: projected from the token as they are, normalised by an RMS norm without
# weights of each head, or made of the keys before their norm and rotation by such a norm (Gemma 4).
type Values = Literal["projected", "normalised", "keys"]


def sum_last(x: jax.Array, *, fixed: bool = False) -> jax.Array:  # float32[..., D] -> [..., 1]
    """The sum over the last axis. The order of XLA's depends on the sizes of the other axes, unless
    it is ``fixed``: by the native library, or on a GPU by a Triton kernel.
    """
    if not fixed:
        return jnp.sum(x, axis=-1, keepdims=True)
    if current_device().platform == "gpu":
        return _of_rows(x)
    flat, ones = x.reshape(-1, x.shape[-1]), jnp.ones((1, x.shape[-1]), x.dtype)
    result = jax.ShapeDtypeStruct((len(flat), 1), x.dtype)
    return call(FIXED_GEMM, result, flat, ones, by_output=True).reshape(*x.shape[:-1], 1)


def _of_rows(x: jax.Array, *, exponents: bool = False) -> jax.Array:  # [..., D] -> [..., 1]
    from pallas_kernels.lib.row_sums.triton import (
        row_sums,  # Triton is optional, and slow to import
    )

    flat = row_sums(x.reshape(-1, x.shape[-1]), exponents=exponents)
    return flat.reshape(*x.shape[:-1], 1)


def mean_last(x: jax.Array, *, fixed: bool = False) -> jax.Array:  # float32[..., D] -> [..., 1]
    """The mean over the last axis: see ``sum_last``."""
    if not fixed:
        return jnp.mean(x, axis=-1, keepdims=True)
    return sum_last(x, fixed=True) / x.shape[-1]


def softmax_last(x: jax.Array, *, fixed: bool = False) -> jax.Array:  # float32[..., D]
    """The softmax over the last axis: see ``sum_last``."""
    if not fixed:
        return jax.nn.softmax(x)
    each = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return each / sum_last(each, fixed=True)


def logsumexp_last(x: jax.Array, *, fixed: bool = False) -> jax.Array:  # [..., D] -> [..., 1]
    """The logarithm of the sum of exponentials over the last axis: see ``sum_last``."""
    if not fixed:
        return jax.nn.logsumexp(x, axis=-1, keepdims=True)
    if current_device().platform == "gpu":
        return _of_rows(x, exponents=True)
    largest = x.max(axis=-1, keepdims=True)
    return jnp.log(sum_last(jnp.exp(x - largest), fixed=True)) + largest


def rms_norm(
    x: jax.Array,  # [..., D]
    weight: jax.Array,  # [D]
    eps: float,
    *,
    fixed: bool = False,
) -> jax.Array:  # [..., D]
    """Root mean square normalisation over the last axis (Zhang and Sennrich 2019).

    ``fixed`` is as in ``sum_last``.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(mean_last(jnp.square(x32), fixed=fixed) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def add_partials(x: jax.Array, partials: jax.Array) -> jax.Array:  # [T, D] -> [T, D]
    """``x`` plus [T, D] in its dtype, or plus the sum of split-K partials float32[S, T, D], rounded
    once.
    """
    if partials.ndim == x.ndim:
        return x + partials
    return (x.astype(jnp.float32) + partials.sum(0)).astype(x.dtype)


def sum_partials(out: jax.Array) -> jax.Array:  # [T, O], or float32[S, T, O] -> [T, O]
    """A result as it is compared: partials by their sum. All cases with partials are bfloat16."""
    return out if out.ndim == 2 else out.sum(0).astype(jnp.bfloat16)


def rotate(
    x: jax.Array,  # [T, heads, H]
    cos: jax.Array,  # float32[T, H / 2]
    sin: jax.Array,  # float32[T, H / 2]
) -> jax.Array:  # [T, heads, H]
    """Rotate every head by its token's angles (Su et al. 2021); component i pairs with i + H/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_heads(
    qkv: jax.Array,  # [T, N + 2K, H]
    num_kv_heads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, H], 2 * [T, K, H]
    """Split the fused projection into queries, keys and values."""
    values = qkv.shape[1] - num_kv_heads
    q, k, v = jnp.split(qkv, (values - num_kv_heads, values), axis=1)
    return q, k, v


def heads_of_new_token(values: Values) -> int:
    """Heads of a new token for each kv head: a key, and a value unless it is made of the key."""
    return 1 if values == "keys" else 2


def with_values(
    heads: jax.Array,  # [T, N + 2K, H], or without values [T, N + K, H]
    num_kv_heads: int,
    values: Values,
    eps: float,
    *,
    fixed: bool = False,  # see ``sum_last``
) -> jax.Array:  # [T, N + 2K, H]
    """Queries, keys, and values after their norm; they may be made of the keys."""
    if values == "projected":
        return heads
    last = heads[:, -num_kv_heads:]
    normed = rms_norm(last, jnp.ones(heads.shape[2], heads.dtype), eps, fixed=fixed)
    others = heads if values == "keys" else heads[:, :-num_kv_heads]
    return jnp.concatenate([others, normed], axis=1)


def split_and_rotate(
    qkv: jax.Array,  # [T, N + 2K, H]
    cos: jax.Array,  # float32[T, H / 2]
    sin: jax.Array,  # float32[T, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    num_kv_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, H], 2 * [T, K, H]
    """Queries and keys, normalised (with ``qk_norms``) and rotated, and unchanged values."""
    q, k, v = split_heads(qkv, num_kv_heads)
    if qk_norms is not None:
        q, k = rms_norm(q, qk_norms[0], eps), rms_norm(k, qk_norms[1], eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: the size of a Triton tile."""
    return 1 << (n - 1).bit_length()
