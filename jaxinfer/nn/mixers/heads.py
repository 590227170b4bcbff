"""Operations of attention on queries and keys before rope, and on outputs, in XLA.

The kernels of attention have RMS norms of single heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.block import QueryGrowth
from jaxinfer.nn.context import Angles, StepContext
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.layer_spec import GateAct
from jaxinfer.nn.linear import divided_rms_norms, layer_norm
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.lib.numerics import rms_norm, rotate, split_and_rotate, split_heads


def first_rotated(
    x: jax.Array,  # [T, heads, I]
    rope: RopeConfig,
    angles: Angles,
) -> jax.Array:  # [T, heads, I]
    """Heads of which the first ``rope.width`` components rotate, i with i + half of them."""
    cos, sin = (table[:, : rope.width // 2] for table in angles)
    turned = rotate(x[..., : rope.width], cos, sin)
    return jnp.concatenate((turned, x[..., rope.width :]), axis=-1)


def normalised(
    heads: jax.Array,  # [T, N + 2K, H]
    weights: jax.Array,  # [2, H]: of queries, of keys
    config: AttentionConfig,
    eps: float,
    ctx: StepContext,
) -> jax.Array:  # [T, N + 2K, H]
    """The heads after rope, if there is one, and RMS norms of queries and keys.

    XLA fuses them; the kernels of attention normalise before they rotate, and only then.
    """
    k = config.num_kv_heads
    if config.rope is None:
        parts = split_heads(heads, k)
    else:
        parts = split_and_rotate(heads, *ctx.angles[0], None, k, eps)
    q, keys, v = parts
    fixed = ctx.pins.invariant
    q = rms_norm(q, weights[0], eps, fixed=fixed)
    keys = rms_norm(keys, weights[1], eps, fixed=fixed)
    return jnp.concatenate([q, keys, v], axis=1)


def growth_factors(growth: QueryGrowth, positions: jax.Array, dtype: Any) -> jax.Array:  # [T]
    """The factors of queries at positions int32[T]."""
    whole = ((positions + growth.offset) // growth.original).astype(jnp.float32)
    return (1 + growth.beta * jnp.log1p(whole)).astype(dtype)


def learned_growth(
    weights: jax.Array,  # [2, N]
    positions: jax.Array,  # int32[T]
    dtype: Any,
) -> jax.Array:  # [T, N, 1]
    """The factors a log(p + 1) + b of the queries of each head at positions p, of its parameters a
    and b (scalable softmax, Mistral Large 4).
    """
    logs = jnp.log((positions + 1).astype(jnp.float32)).astype(dtype)[:, None]
    own = weights.astype(dtype)
    return (own[0] * logs + own[1])[..., None]


def grown(
    heads: jax.Array,  # [T, N + 2K, H]
    growth: QueryGrowth,
    num_kv_heads: int,
    positions: jax.Array,  # int32[T]
) -> jax.Array:  # [T, N + 2K, H]
    """The heads with queries that grow with the position."""
    factors = growth_factors(growth, positions, heads.dtype)
    n = heads.shape[1] - 2 * num_kv_heads
    return jnp.concatenate([heads[:, :n] * factors[:, None, None], heads[:, n:]], axis=1)


def gated(
    out: jax.Array,  # [T, N, H]
    gates: jax.Array,  # [T, N, H] or [T, N, 1]
    act: GateAct,
) -> jax.Array:  # [T, N, H]
    """Outputs of heads times a function of their gates."""
    by = _GATE_ACTS[act](gates.astype(jnp.float32))
    return (out.astype(jnp.float32) * by).astype(out.dtype)


def _softplus_2(x: jax.Array) -> jax.Array:
    return jnp.logaddexp2(x, 0.0)


_GATE_ACTS: Mapping[GateAct, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "sigmoid": jax.nn.sigmoid,
        "softplus": jax.nn.softplus,
        "softplus_2": _softplus_2,
        "silu": jax.nn.silu,
    }
)


def widened(
    qkv: jax.Array,  # [T, (N + K) * H + K * V]
    config: AttentionConfig,
) -> jax.Array:  # [T, (N + 2K) * H]
    """The heads with values times their scale, and with zeros behind them if they are narrower."""
    first = (config.num_heads + config.num_kv_heads) * config.head_dim
    qk, v = jnp.split(qkv, (first,), axis=1)
    v = (v * config.value_scale).reshape(len(v), config.num_kv_heads, -1)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, config.head_dim - config.value_dim)))
    return jnp.concatenate([qk, v.reshape(len(v), -1)], axis=1)


def norm_all(
    qkv: jax.Array,  # [T, (N + 2K) * H]
    weights: jax.Array,  # [(N + K) * H]: of queries, of keys
    config: AttentionConfig,
    eps: float,
    ctx: StepContext,
) -> jax.Array:  # [T, (N + 2K) * H]
    """RMS norms of a token's queries and of its keys, each over all heads, also of other devices.

    XLA fuses them; the kernels of attention normalise single heads.
    """
    widths = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    parts = jnp.split(qkv, (widths[0], sum(widths)), axis=1)
    parts[:2] = divided_rms_norms(parts[:2], jnp.split(weights, widths[:1]), eps, ctx)
    return jnp.concatenate(parts, axis=1)


def layer_norms(
    heads: jax.Array,  # [T, N + 2K, H]
    weights: jax.Array,  # [4, H] or [(N + K) * H]: see ``AttentionConfig.qk_norm``
    biases: jax.Array | None,  # [(N + K) * H]
    config: AttentionConfig,
    eps: float,
    ctx: StepContext,
) -> jax.Array:  # [T, N + 2K, H]
    """The heads after LayerNorms of each query and each key."""
    n, k = config.num_heads, config.num_kv_heads
    eps = config.qk_norm_eps or eps
    q, keys, v = jnp.split(heads, (n, n + k), axis=1)
    if config.qk_norm == "layer":
        (q_weight, q_bias), (k_weight, k_bias) = weights[:2], weights[2:]
    else:
        q_weight, k_weight = jnp.split(weights.reshape(n + k, -1), (n,))
        q_bias = k_bias = None
        if biases is not None:
            q_bias, k_bias = jnp.split(biases.reshape(n + k, -1), (n,))
    fixed = ctx.pins.invariant
    q = layer_norm(q, q_weight, q_bias, eps, fixed=fixed)
    keys = layer_norm(keys, k_weight, k_bias, eps, fixed=fixed)
    return jnp.concatenate([q, keys, v], axis=1)
