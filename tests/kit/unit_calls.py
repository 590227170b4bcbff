"""``ArrayCalls``: the calls of a GPU's mover by XLA, for CPUs, which have no kernels for units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_arrays import DeviceArrays
from jaxinfer.exec.tiers.mover import Pools
from pallas_kernels.units.layout import WORD


class ArrayCalls:
    """``UnitCalls`` with all arrays of a pool as arguments."""

    def __init__(
        self,
        program: Program,
        arrays: DeviceArrays,
        pools: Pools,
        widths: Mapping[int | None, int],
        block_words: int,
    ) -> None:
        self._arrays, self._pools = arrays, pools
        self._packs: dict[int | None, Any] = {}
        self._unpacks: dict[int | None, Any] = {}
        block = jax.ShapeDtypeStruct((block_words,), WORD)
        with program.placement.as_default():
            for pool in pools.indices:
                given, rows = pools.given(pool), jax.ShapeDtypeStruct((1 + widths[pool],), np.int32)
                self._packs[pool] = jax.jit(_packed).lower(given, rows).compile()
                unpack = jax.jit(_unpacked, donate_argnums=(0,))
                self._unpacks[pool] = unpack.lower(given, rows, block).compile()

    def pack(self, pool: int | None, rows: np.ndarray) -> jax.Array:
        given = tuple(self._arrays.state[i] for i in self._pools.indices[pool])
        packed: jax.Array = self._packs[pool](given, rows)
        return packed

    def unpack(self, pool: int | None, rows: np.ndarray, block: jax.Array) -> jax.Array:
        indices = self._pools.indices[pool]
        given = tuple(self._arrays.state[i] for i in indices)
        made, read = self._unpacks[pool](given, rows, block)
        self._arrays.replace(indices, made)
        return read  # type: ignore[no-any-return]

    def settle(self) -> None:
        pass


def _packed(arrays: Sequence[jax.Array], rows: jax.Array) -> jax.Array:
    units = [_as_words(array).at[rows[1:]].get(mode="promise_in_bounds") for array in arrays]
    return jnp.concatenate(units, axis=1)


def _unpacked(
    arrays: Sequence[jax.Array], rows: jax.Array, block: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    width, words = rows.size - 1, [_as_words(array).shape[1] for array in arrays]
    units = block[: width * sum(words)].reshape(width, -1)
    places = jnp.where(jnp.arange(width) < rows[0], rows[1:], len(arrays[0]))
    made = []
    for array, own in zip(arrays, jnp.split(units, np.cumsum(words)[:-1], axis=1), strict=True):
        written = _as_words(array).at[places].set(own, mode="drop")
        made.append(lax.bitcast_convert_type(written, array.dtype).reshape(array.shape))
    return tuple(made), rows.sum()


def _as_words(rows: Any) -> jax.Array:
    """A row's bytes, as they are in memory: int32[rows, words]."""
    each = WORD.itemsize // rows.dtype.itemsize
    shape = (rows.shape[0], -1, each) if each > 1 else (rows.shape[0], -1)
    return lax.bitcast_convert_type(rows.reshape(shape), WORD).reshape(rows.shape[0], -1)
