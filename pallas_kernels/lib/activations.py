"""The activations of feed-forward networks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp


def _gelu(x: jax.Array) -> jax.Array:  # [...] -> [...]
    return jax.nn.gelu(x, approximate=False)


def _quick_gelu(x: jax.Array) -> jax.Array:  # [...] -> [...]
    return x * jax.nn.sigmoid(1.702 * x)


def _relu_squared(x: jax.Array) -> jax.Array:  # [...] -> [...]
    return jnp.square(jax.nn.relu(x))


def _linear(x: jax.Array) -> jax.Array:  # [...] -> [...]
    return x


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": _gelu,
        "gelu_tanh": jax.nn.gelu,  # JAX's default is the approximation by tanh
        "quick_gelu": _quick_gelu,
        "relu": jax.nn.relu,
        "relu2": _relu_squared,
        "relu6": jax.nn.relu6,
        "leaky_relu": jax.nn.leaky_relu,
        "mish": jax.nn.mish,
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
        "linear": _linear,
    }
)
