"""The activations of feed-forward networks, by name and by their other names in configs."""

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


def xielu(x: jax.Array, alphas: jax.Array) -> jax.Array:  # [...] and [2] -> [...]
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), with beta 0.5 and parameters."""
    beta, x32 = 0.5, x.astype(jnp.float32)
    positive, negative = jax.nn.softplus(alphas.astype(jnp.float32))
    above = positive * jnp.square(x32)
    below = (beta + negative) * (jnp.expm1(jnp.minimum(x32, -1e-6)) - x32)
    return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x.dtype)


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
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "swish": "silu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
    }
)
