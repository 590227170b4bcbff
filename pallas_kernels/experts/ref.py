"""The definition of experts: each expert in float32, for the tokens that chose it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.experts.stack import Activation, matrix_of

NUM_ARRAYS = 5  # of a stack


def experts(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
    split: bool,
) -> jax.Array:  # [T, D]
    """See ``experts.api``."""
    del split  # partials are defined by their sum
    gate_up, down = arrays[:NUM_ARRAYS], arrays[NUM_ARRAYS : 2 * NUM_ARRAYS]
    biases = arrays[2 * NUM_ARRAYS :]
    x32, choices = jnp.asarray(x, jnp.float32), jnp.asarray(choices)

    def add_expert(expert: jax.Array, found: jax.Array) -> jax.Array:  # float32[T, k, D]
        hidden = jnp.matmul(x32, _transposed(kinds[0], gate_up, expert), precision="highest")
        hidden = activation(*jnp.split(_with_bias(hidden, biases[0], expert), 2, axis=1))
        y = jnp.matmul(hidden, _transposed(kinds[1], down, expert), precision="highest")
        y = _with_bias(y, biases[1], expert)
        return jnp.where((choices == expert)[..., None], y[:, None], found)

    none = jnp.zeros((*choices.shape, x.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, gate_up[0].shape[0], add_expert, none)
    return jnp.sum(outputs * jnp.asarray(weights)[..., None], axis=1).astype(x.dtype)


def _transposed(kind: str, arrays: Any, expert: jax.Array) -> jax.Array:  # float32[K, O]
    as_jax = tuple(None if part is None else jnp.asarray(part) for part in arrays)
    return matrix_of(kind, as_jax, expert).astype(jnp.float32).T  # type: ignore[arg-type]


def _with_bias(y: jax.Array, bias: Any, expert: jax.Array) -> jax.Array:
    return y if bias is None else y + jnp.asarray(bias)[expert].astype(jnp.float32)
