"""Random weights for a model of which only the config is known: tests of speed and memory.

Owns: how a parameter's name decides its values.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params, abstract_params
from jaxinfer.models.tree import by_path, nested

_DEVIATION = 0.02  # the usual initializer_range; activations stay near 1 in every family
# In turn, the programs of Qwen3-4B's 8 shapes took an H200's host 0.9 s of a start of 3.7.
COMPILE_THREADS = 8

type Leaf = jax.ShapeDtypeStruct
type Programs = dict[tuple[tuple[int, ...], jnp.dtype], Future[jax.stages.Compiled]]


def dummy_params(model: Model, *, seed: int, progress: Progress) -> Params:
    """Norms one, biases zero, all else uniform with deviation 0.02; the same for the same seed."""
    abstract = by_path(abstract_params(model))
    params: dict[str, jax.Array] = {}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values())
    pool = ThreadPoolExecutor(COMPILE_THREADS)
    try:
        with progress.task("Making random weights", total) as advance:
            programs = _compiling(pool, abstract)
            for path, leaf in abstract.items():
                params[path] = _leaf(seed, path, leaf, programs)
                advance(leaf.size * leaf.dtype.itemsize)
    finally:  # after a failure or Ctrl-C, nobody needs the rest
        pool.shutdown(wait=False, cancel_futures=True)
    return nested(params)


def _compiling(pool: ThreadPoolExecutor, abstract: Mapping[str, Leaf]) -> Programs:
    """A program for each shape that random leaves have. This thread lowers, the pool compiles."""
    shapes = dict.fromkeys(
        (leaf.shape, leaf.dtype) for path, leaf in abstract.items() if _constant(path) is None
    )
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    return {one: pool.submit(_uniform.lower(seed, *one).compile) for one in shapes}


def _leaf(seed: int, path: str, leaf: Leaf, programs: Programs) -> jax.Array:
    constant = _constant(path)
    if constant is not None:  # from the host: a program of XLA's for each shape takes 40 ms and up
        return jax.device_put(np.full(leaf.shape, constant, leaf.dtype))
    program = programs[leaf.shape, leaf.dtype].result()
    return program(np.uint32(zlib.crc32(f"{seed}/{path}".encode())))


def _constant(path: str) -> int | None:
    """What each value of a parameter is, None of a random one."""
    name = path.rpartition("/")[2]
    if name.endswith("bias"):
        return 0
    return 1 if "norm" in name else None


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
