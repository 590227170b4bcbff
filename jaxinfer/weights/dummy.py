"""Random weights for a model of which only the config is known: tests of speed and memory.

Owns: how a parameter's name decides its values. Must not know: checkpoints.
"""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params, abstract_params
from jaxinfer.weights.tree import by_path, nested

_SCALE = 0.02  # the usual initializer_range; activations stay near 1 in every family


def dummy_params(model: Model, *, seed: int, progress: Progress) -> Params:
    """Norms one, biases zero, all else normal with deviation 0.02; the same for the same seed."""
    abstract = by_path(abstract_params(model))
    root = jax.random.key(seed)
    params: dict[str, jax.Array] = {}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values())
    with progress.task("Making random weights", total) as advance:
        for path, leaf in abstract.items():
            params[path] = _leaf(root, path, leaf.shape, leaf.dtype)
            advance(leaf.size * leaf.dtype.itemsize)
    return nested(params)


def _leaf(root: jax.Array, path: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    name = path.rpartition("/")[2]
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    if "norm" in name:
        return jnp.ones(shape, dtype)
    key = jax.random.fold_in(root, zlib.crc32(path.encode()))
    return _normal(key, shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return _SCALE * jax.random.normal(key, shape, dtype)
