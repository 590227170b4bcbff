"""xIELU, which has parameters, and other names of activations in configs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp


def xielu(x: jax.Array, alphas: jax.Array) -> jax.Array:  # [...] and [2] -> [...]
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), with beta 0.5 and parameters."""
    beta, x32 = 0.5, x.astype(jnp.float32)
    positive, negative = jax.nn.softplus(alphas.astype(jnp.float32))
    above = positive * jnp.square(x32)
    below = (beta + negative) * (jnp.expm1(jnp.minimum(x32, -1e-6)) - x32)
    return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x.dtype)


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
