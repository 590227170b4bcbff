"""xIELU, which has parameters, and other names of activations in configs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp


def xielu(x: jax.Array, params: jax.Array) -> jax.Array:  # [...] and [4] -> [...]
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010) with alpha_p, alpha_n, beta and epsilon."""
    alpha_p, alpha_n, beta, eps = params.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    above = jax.nn.softplus(alpha_p) * jnp.square(x32)
    below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
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
