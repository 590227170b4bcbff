"""The definition of delta_decode: one token of each row, with all that is fused with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_prefill.ref import step
from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaDecodeArgs:
    """The arguments of ``delta_decode``; C = 2 * K * Dk + V * Dv channels: queries, keys, values.

    G is V if a head has one decay, and V * Dk if each component of its keys has one.
    ``convs`` holds the last W inputs of a sequence's convolution: that of position p at p % W.
    """

    qkv: jax.Array  # [B, C], before the convolution
    gates: jax.Array  # [B, V + G]: of beta, of the decay
    z: jax.Array  # [B, V * Dv]: the gate of the output
    conv: jax.Array  # [W, C]; the last tap is of the token itself
    decay: jax.Array  # float32[V + G]: logarithms of the heads' rates, biases of their steps
    norm: jax.Array  # [Dv]
    states: jax.Array  # float32[P, V, Dk, Dv]
    convs: jax.Array  # [P, W, C]
    positions: jax.Array  # int32[B]: of the token; at 0 the state is zeros
    rows: jax.Array  # int32[B]: where the states of its sequence are, which are replaced
    # where they are stored besides, all inputs of the convolution, too; the same row: nowhere
    keeps: jax.Array | None = None  # int32[B]
    eps: float = field(metadata=STATIC)
    z_act: Literal["silu", "sigmoid"] = field(default="silu", metadata=STATIC)
    beta_scale: float = field(default=1.0, metadata=STATIC)

    @property
    def num_key_heads(self) -> int:
        """K."""
        _, heads, key_dim, value_dim = self.states.shape
        return (self.qkv.shape[1] - heads * value_dim) // (2 * key_dim)

    @property
    def by_channel(self) -> bool:
        """True if each component of keys has a decay of its own."""
        return self.decay.shape[0] != 2 * self.states.shape[1]


def delta_decode(args: DeltaDecodeArgs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, V * Dv], the states, and the inputs of convolutions."""
    qkv, gates, z, conv, decay, norm, states, convs = (
        np.asarray(x, np.float64)
        for x in (
            *(args.qkv, args.gates, args.z, args.conv, args.decay, args.norm, args.states),
            args.convs,
        )
    )
    (_, heads, key_dim, value_dim), width = states.shape, len(conv)
    out = np.zeros(z.shape)
    for row, position in enumerate(np.asarray(args.positions)):
        own = args.rows[row]
        convs[own, position % width] = qkv[row]
        inputs = {p: convs[own, p % width] for p in range(position - width + 1, position + 1)}
        taps = [x if p >= 0 else np.zeros_like(x) for p, x in inputs.items()]
        mixed = _silu(np.einsum("wc,wc->c", conv, np.stack(taps)))
        q, k, v = np.split(mixed, np.cumsum([args.num_key_heads * key_dim] * 2))
        q, k = (
            _unit(x.reshape(-1, key_dim)).repeat(heads // args.num_key_heads, 0) for x in (q, k)
        )
        beta = args.beta_scale / (1 + np.exp(-gates[row, :heads]))
        steps = np.logaddexp(0, gates[row, heads:] + decay[heads:]).reshape(heads, -1)
        log_decay = -np.exp(decay[:heads, None]) * steps
        state = states[own] if position else np.zeros(states.shape[1:])
        v = v.reshape(heads, value_dim)
        states[own], o = step(state, q * key_dim**-0.5, k, v, log_decay, beta)
        o = o / np.sqrt(np.mean(o**2, axis=-1, keepdims=True) + args.eps) * norm
        gate = _silu(z[row]) if args.z_act == "silu" else 1 / (1 + np.exp(-z[row]))
        out[row] = o.reshape(-1) * gate
        if args.keeps is not None:
            states[args.keeps[row]], convs[args.keeps[row]] = states[own], convs[own]
    return (
        jnp.asarray(out, args.qkv.dtype),
        jnp.asarray(states, args.states.dtype),
        jnp.asarray(convs, args.convs.dtype),
    )


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
