"""Random weights for a model of which only the config is known, to test speed and memory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import nested
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.placement import Placement, is_divided, positions
from pallas_kernels.lib.arrangements import arrangement_of
from pallas_kernels.lib.quantised import MIDDLE, is_matrix, kind_and_form
from pallas_kernels.quantised_gemm.tiled.records import factor_rows

_DEVIATION = 0.02  # the usual initializer_range; activations stay near 1 in every family
# The deviation of random values of quantised matrices, which ``_uniform`` makes: integers are
# uniform over their range.
_DEVIATIONS = MappingProxyType({"int4": 4.6, "int8": 74.0, "fp8": _DEVIATION, "fp4": 2.9})
_SMALL_FACTOR = 32  # integer scales and offsets; those of GGUF's K forms have 6 bits
# Compiled by one thread, Qwen3-4B's 8 programs took 0.9 s of a start of 3.7 s (H200).
COMPILE_THREADS = 8


# a kind of arrays, and the words in the last rows of records
type Kind = tuple[ArraySpec, tuple[int, ...]]
type Programs = dict[Kind, Future[jax.stages.Compiled]]


def dummy_params(model: Model, *, placement: Placement, seed: int, progress: Progress) -> Params:
    """Random parameters that are a function of the seed; those of floats on any devices alike.

    Norms and other factors are 1, biases 0, and other floats uniform with standard deviation 0.02.
    Integers are uniform over their dtype's range, with scales and offsets that give weights that
    deviation. Random arrays are made on the devices, so host memory holds none of them.
    """
    params: dict[str, jax.Array] = {}
    arrays, wholes = model.arrays, _wholes(model)
    total = sum(array.nbytes for array in arrays.values())
    pool = ThreadPoolExecutor(COMPILE_THREADS)
    try:
        with progress.task("make random weights", total, "B") as advance:
            constants = _constants(arrays)
            programs = _compiling(pool, arrays, constants, placement)
            for path, array in arrays.items():
                if constants[path] is not None:
                    # made on the host: an XLA program per shape takes 40 ms or more
                    filled = _filled(
                        placement.own_shape(array.shape, array.axes), array, constants[path]
                    )
                    parts = [jax.device_put(filled, device) for device in placement.own_devices]
                    params[path] = placement.of_parts(parts, array.axes)
                else:
                    program = programs[_kind(path, array, placement)].result()
                    number = np.uint32(zlib.crc32(f"{seed}/{path}".encode()))
                    found = _positions(array, wholes[path], model.devices, placement)
                    params[path] = program(number, *found)
                advance(array.nbytes)
    finally:  # after a failure or Ctrl-C the other programs are not needed
        pool.shutdown(wait=False, cancel_futures=True)
    return nested(params)


def _kind(path: str, array: ArraySpec, placement: Placement) -> Kind:
    """The array without axes that are not divided: equal ones are made by the same program."""
    return replace(array, axes=placement.divided(array.axes)), _factor_words(path)


def _wholes(model: Model) -> dict[str, ArraySpec | None]:
    """The array of each path before it is divided; None for one of a quantised matrix."""
    found: dict[str, ArraySpec | None] = dict.fromkeys(model.arrays)
    for spec in model.param_specs:
        if spec.division is not None and all(source.form is None for source in spec.sources):
            found |= spec.wholes
    return found


def _positions(
    array: ArraySpec, whole: ArraySpec | None, devices: int, placement: Placement
) -> list[jax.Array]:
    """For each dimension of a divided array the positions of its elements in the whole one, divided
    alike; and the sizes of that. On one device none.
    """
    if placement.num_devices == 1:
        return []
    axes = array.axes if whole is None else whole.axes
    shape = array.shape if whole is None else whole.shape
    found = list[jax.Array]()
    for axis, own, size in zip(axes, array.shape, shape, strict=True):
        numbers = np.arange(own)
        if whole is not None and devices > 1 and is_divided(axis):
            numbers = positions(axis, size, devices).ravel()
        found.append(placement.put(numbers.astype(np.uint32), (axis,)))
    return [*found, placement.put(np.array(shape, np.uint32))]


def _compiling(
    pool: ThreadPoolExecutor,
    arrays: Mapping[str, ArraySpec],
    constants: Mapping[str, Any],
    placement: Placement,
) -> Programs:
    """A program for each kind of random array. This thread lowers; the pool's threads compile."""
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    kinds = dict.fromkeys(
        _kind(path, array, placement) for path, array in arrays.items() if constants[path] is None
    )

    def program(kind: ArraySpec, factors: tuple[int, ...]) -> jax.stages.Lowered:
        sharding, dtype = placement.sharding(kind.axes), jnp.dtype(kind.dtype)
        words = np.array(factors, np.uint32).view(np.int32)[:, None]

        def with_factors(found: jax.Array) -> jax.Array:
            return found.at[..., -len(words) :, :].set(words) if factors else found

        if placement.num_devices == 1:

            def whole(seed: jax.Array) -> jax.Array:
                indices = jax.lax.iota(jnp.uint32, math.prod(kind.shape))
                return with_factors(_uniform(seed, indices, dtype).reshape(kind.shape))

            return jax.jit(whole, out_shardings=sharding).lower(seed)

        def values(seed: jax.Array, *found: jax.Array) -> jax.Array:
            *places, shape = found
            index = jnp.zeros((), jnp.uint32)
            for dimension, place in enumerate(places):
                ones = [1] * len(places)
                ones[dimension] = -1
                index = index * shape[dimension] + place.reshape(ones)
            return with_factors(_uniform(seed, index, dtype))

        pairs = zip(kind.shape, kind.axes, strict=True)
        given = [placement.abstract((size,), jnp.uint32, (axis,)) for size, axis in pairs]
        given.append(placement.abstract((len(kind.shape),), jnp.uint32))
        return jax.jit(values, out_shardings=sharding).lower(
            placement.abstract((), jnp.uint32), *given
        )

    return {kind: pool.submit(program(*kind).compile) for kind in kinds}


def _filled(shape: tuple[int, ...], array: ArraySpec, constant: Any) -> np.ndarray:
    """A device's part of an array of one value, or of a few that repeat.

    Not by ``np.resize``, which joins a tuple with an item for each repetition: with it 16.7 GB of
    int4 experts took 81 s.
    """
    values = np.atleast_1d(np.asarray(constant, array.dtype))
    filled = np.empty(math.prod(shape), array.dtype)
    whole = filled.size - filled.size % values.size
    filled[:whole].reshape(-1, values.size)[...] = values
    filled[whole:] = values[: filled.size - whole]
    return filled.reshape(shape)


def _constants(arrays: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """By path, the value of every element of an array, or values to repeat; None for random."""
    folders: dict[str, dict[str, ArraySpec]] = {}
    for path, array in arrays.items():
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, {})[name] = array
    return {path: _constant(path, folders[path.rpartition("/")[0]]) for path in arrays}


def _constant(path: str, names: Mapping[str, ArraySpec]) -> Any:
    """See ``_constants``; ``names`` are those of all arrays of the same module or matrix."""
    name = path.rpartition("/")[2]
    if is_matrix(names):
        kind = next(one for one in names if is_matrix({one: None}))
        return _factor(name, kind, names)
    if name == "expert_table":  # each token's experts are the next ones
        return np.arange(names["router"].shape[0])
    if name == "scales":
        return _DEVIATION / _DEVIATIONS["int8"]
    if name.endswith("bias"):
        return 0
    return 1 if "norm" in name or name.endswith("_scale") else None


def _weight_factors(base: str) -> tuple[float, float]:
    """The scale of a kind's values, and the mean of the products."""
    scale = _DEVIATION / _DEVIATIONS[base]
    return scale, (MIDDLE - 0.5) * scale if base == "int4" else 0.0


def _factor(name: str, kind: str, others: Collection[str]) -> Any:
    """Scales, zeros, offsets and supers that give random values the deviation, with mean near 0."""
    arrangement, base = arrangement_of(kind), kind.partition("_")[0]
    scale, middle = _weight_factors(base)
    if "supers" in others:  # scales and offsets are integers
        supers = np.array([scale, -middle][: 1 + ("offsets" in others)]) / _SMALL_FACTOR
        supers = np.repeat(supers, 1 if arrangement is None else arrangement.outputs)
        return {"scales": _SMALL_FACTOR, "offsets": _SMALL_FACTOR, "supers": supers}.get(name)
    return {"scales": scale, "zeros": MIDDLE, "offsets": -middle}.get(name)


def _factor_words(path: str) -> tuple[int, ...]:
    """The last rows of records, those of factors, as ``_factor`` has these; else none."""
    _, form = kind_and_form(path.rpartition("/")[2])
    if form is None:
        return ()
    scale, middle = _weight_factors(form.kind)
    supers = np.array([scale, -middle * form.offsets], np.float16) / _SMALL_FACTOR
    word = int(supers.view(np.uint32)[0])
    return (0x01010101 * _SMALL_FACTOR,) * (factor_rows(form) - 1) + (word,)


def _uniform(seed: jax.Array, indices: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A hash of each element's index: on a CPU ten times as fast as jax.random."""
    # the seed is added between two hashes: else arrays would be shifted copies of each other
    mixed = _mixed(_mixed(indices) ^ seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return mixed.astype(dtype)  # the lowest bits
    unit = mixed.astype(jnp.float32) * 2**-32 - 0.5  # deviation 1 / sqrt(12)
    return (unit * (_DEVIATION * math.sqrt(12))).astype(dtype)


def _mixed(x: jax.Array) -> jax.Array:  # uint32[...] -> uint32[...]
    """The finaliser of MurmurHash3 (Appleby 2011): each output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
