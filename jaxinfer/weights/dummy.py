"""Random weights for a model of which only the config is known: tests of speed and memory.

Owns: how a parameter's name decides its values. Must not know: checkpoints.
"""

from __future__ import annotations

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params, abstract_params
from jaxinfer.weights.tree import by_path, nested

_DEVIATION = 0.02  # the usual initializer_range; activations stay near 1 in every family


def dummy_params(model: Model, *, seed: int, progress: Progress) -> Params:
    """Norms one, biases zero, all else uniform with deviation 0.02; the same for the same seed."""
    abstract = by_path(abstract_params(model))
    params: dict[str, jax.Array] = {}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values())
    with progress.task("Making random weights", total) as advance:
        for path, leaf in abstract.items():
            params[path] = _leaf(seed, path, leaf.shape, leaf.dtype)
            advance(leaf.size * leaf.dtype.itemsize)
    return nested(params)


def _leaf(seed: int, path: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    name = path.rpartition("/")[2]
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    if "norm" in name:
        return jnp.ones(shape, dtype)
    return _uniform(np.uint32(zlib.crc32(f"{seed}/{path}".encode())), shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(seed: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A hash of each value's place: on a CPU an order of magnitude faster than jax.random."""
    places = jax.lax.iota(jnp.uint32, math.prod(shape))
    mixed = _mixed(_mixed(places) ^ seed)  # seed in between: else leaves hold shifted copies
    unit = mixed.astype(jnp.float32) * 2**-32 - 0.5  # deviation 1 / sqrt(12)
    return (unit * (_DEVIATION * math.sqrt(12))).astype(dtype).reshape(shape)


def _mixed(x: jax.Array) -> jax.Array:  # uint32[...] -> uint32[...]
    """The last steps of MurmurHash3 (Appleby 2011): every bit comes to depend on every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
