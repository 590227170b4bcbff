"""delta_decode in plain XLA, for all rows at once."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.short_conv.xla import short_conv_decode


@jax.jit  # one trace serves every layer
def delta_decode(args: DeltaDecodeArgs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``delta_decode.api``."""
    (rows, _), (_, heads, key_dim, value_dim) = args.qkv.shape, args.states.shape
    mixed, convs = short_conv_decode(
        args.qkv, args.conv, None, args.convs, args.positions, args.rows, silu=True
    )
    widths = args.num_key_heads * key_dim
    q, k, v = jnp.split(mixed, (widths, 2 * widths), axis=1)
    q, k = unit(q.reshape(rows, -1, key_dim)) * key_dim**-0.5, unit(k.reshape(rows, -1, key_dim))
    q, k = (jnp.repeat(x, heads // args.num_key_heads, axis=1) for x in (q, k))
    beta, log_decay = betas_and_decays(args.gates, args.decay, heads)
    beta = beta if args.beta_scale == 1 else beta * args.beta_scale
    is_new = (args.positions == 0)[:, None, None, None]
    kept = jnp.exp(log_decay).reshape(rows, heads, -1, 1)
    state = jnp.where(is_new, 0, args.states[args.rows]) * kept
    v = v.reshape(rows, heads, value_dim)
    change = (v - jnp.einsum("BVkd,BVk->BVd", state, k, precision="highest")) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    out = jnp.einsum("BVkd,BVk->BVd", state, q, precision="highest")
    out = gated_norm(out, args.z.reshape(v.shape), args.norm, args.eps, args.z_act)
    states = args.states.at[args.rows].set(state)
    if args.keeps is not None:  # few steps save anything, and a scatter moves all states
        is_kept = jnp.any(args.keeps != args.rows)
        states, convs = jax.lax.cond(is_kept, _with_kept, _as_they_are, args, state, states, convs)
    return out.reshape(rows, -1).astype(args.qkv.dtype), states, convs


def _with_kept(
    args: DeltaDecodeArgs, state: jax.Array, states: jax.Array, convs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The states, and the inputs of convolutions, with those that rows save."""
    return states.at[args.keeps].set(state), convs.at[args.keeps].set(convs[args.rows])


def _as_they_are(
    args: DeltaDecodeArgs, state: jax.Array, states: jax.Array, convs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del args, state
    return states, convs


def unit(x: jax.Array) -> jax.Array:  # [..., D] -> float32[..., D]
    """The vectors over their lengths."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def betas_and_decays(
    gates: jax.Array,  # [..., V + G]: of beta, of the decay
    decay: jax.Array,  # float32[V + G]: logarithms of the rates, biases of their steps
    heads: int,  # V
) -> tuple[jax.Array, jax.Array]:  # float32[..., V], float32[..., V] or [..., V, Dk]
    """The strength of the change, and the logarithm of the decay (as in Mamba-2)."""
    gates = gates.astype(jnp.float32)
    step = jax.nn.softplus(gates[..., heads:] + decay[heads:])
    step = step.reshape(*step.shape[:-1], heads, -1)
    log_decay = -jnp.exp(decay[:heads, None]) * step
    one_each = len(decay) == 2 * heads
    return jax.nn.sigmoid(gates[..., :heads]), log_decay[..., 0] if one_each else log_decay


def gated_norm(
    out: jax.Array,  # float32[..., Dv]
    z: jax.Array,  # [..., Dv]
    weight: jax.Array,  # [Dv]
    eps: float,
    act: Literal["silu", "sigmoid"],
) -> jax.Array:  # float32[..., Dv]
    """The RMS norm of each head's output, times the activation of its gate."""
    gate = z.astype(jnp.float32)
    return rms_norm(out, weight, eps) * (
        jax.nn.silu(gate) if act == "silu" else jax.nn.sigmoid(gate)
    )
