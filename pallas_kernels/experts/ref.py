"""The definition of experts: each expert in float32, for the tokens that chose it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.experts.stack import SWIGLU, Activation, Stack, matrix_of, size_of
from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertsArgs:
    """The arguments of ``experts``."""

    x: jax.Array  # [T, D]
    choices: jax.Array  # int32[T, k]
    weights: jax.Array  # float32[T, k]
    gate_up: Stack  # [E, 2F, D]: rows of the gate, then of up; [E, F, D] without gates
    down: Stack  # [E, D, F]
    gate_up_bias: jax.Array | None = None  # [E, 2F], or [E, F]
    down_bias: jax.Array | None = None  # [E, D]
    activation: Activation = field(default=SWIGLU, metadata=STATIC)
    split: bool = field(default=False, metadata=STATIC)


def experts(args: ExpertsArgs) -> jax.Array:  # [T, D]; partials are defined by their sum
    """See ``experts.api``."""
    x32, choices = jnp.asarray(args.x, jnp.float32), jnp.asarray(args.choices)

    def add_expert(expert: jax.Array, found: jax.Array) -> jax.Array:  # float32[T, k, D]
        hidden = jnp.matmul(x32, _transposed(args.gate_up, expert), precision="highest")
        hidden = _with_bias(hidden, args.gate_up_bias, expert)
        hidden = args.activation.hidden(hidden)
        y = jnp.matmul(hidden, _transposed(args.down, expert), precision="highest")
        y = _with_bias(y, args.down_bias, expert)
        return jnp.where((choices == expert)[..., None], y[:, None], found)

    none = jnp.zeros((*choices.shape, args.x.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, size_of(args.gate_up)[0], add_expert, none)
    return jnp.sum(outputs * jnp.asarray(args.weights)[..., None], axis=1).astype(args.x.dtype)


def _transposed(stack: Stack, expert: jax.Array) -> jax.Array:  # float32[K, O]
    return matrix_of(jax.tree.map(jnp.asarray, stack), expert).astype(jnp.float32).T


def _with_bias(y: jax.Array, bias: Any, expert: jax.Array) -> jax.Array:
    return y if bias is None else y + jnp.asarray(bias)[expert].astype(jnp.float32)
