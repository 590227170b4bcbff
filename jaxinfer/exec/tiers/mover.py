"""``PageMover``: copies units between the device's arrays and host memory, without waiting.

Calls are queued among the steps, so a gather reads what the steps before it have written, and a
scatter is read by the steps after it. On a CPU the executables read and write host memory. A GPU
needs another one of these, with staging buffers and a stream of its own: ``Gathered.is_ready`` and
``Staged.is_ready`` are then queries of events, and ``read`` copies from a pinned buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import batched
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.core.connector import Arrays, Forms, Unit, UnitForm
from jaxinfer.core.tiers import DIGEST_SIZE, SNAPSHOTS, TierUnit, group_of
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_arrays import DeviceArrays

WIDTH = 8  # pages of one call; those of fewer are padded
SINK = 0  # the page for padding


class Gathered(Protocol):
    """A copy of units to the host."""

    @property
    def is_ready(self) -> bool:
        """True if ``read`` does not wait."""
        ...

    def read(self) -> list[tuple[bytes, Arrays]]:
        """The units' keys and arrays, which stay valid while this object exists."""
        ...


class Staged(Protocol):
    """Units on their way to the device."""

    @property
    def is_ready(self) -> bool:
        """True if ``PageMover.scatter`` does not wait, and their host memory may be reused."""
        ...


class PageMover(Protocol):
    """Copies units between the device's arrays and host memory."""

    @property
    def forms(self) -> Forms:
        """The arrays of a unit of each group."""
        ...

    def gather(self, units: Sequence[TierUnit]) -> Gathered:
        """Queue a copy of what these places hold before the next step."""
        ...

    def stage(self, units: Sequence[Unit]) -> Any:  # Staged
        """Begin to bring units near the device."""
        ...

    def scatter(self, staged: Any, units: Sequence[TierUnit]) -> None:
        """Queue a copy of staged units to these places, in the same order, before the next step."""
        ...


class ArrayMover:
    """A ``PageMover`` with an executable for each pool, and one for saved states."""

    def __init__(self, program: Program, arrays: DeviceArrays) -> None:
        self._arrays, self._limits = arrays, program.limits
        self._first_snapshot = program.limits.max_num_seqs + 1  # after rows of slots and padding
        self._indices, abstract = _indices(program), program.state()
        self.forms: Forms = forms_of(program)
        self._gathers: dict[int | None, Any] = {}
        self._scatters: dict[int | None, Any] = {}
        with program.placement.as_default():
            for pool, own in self._indices.items():
                width = self._width(pool)
                given = tuple(abstract[i] for i in own)
                ids = jax.ShapeDtypeStruct((width,), np.int32)
                values = tuple(jax.ShapeDtypeStruct((width, *a.shape[1:]), a.dtype) for a in given)
                self._gathers[pool] = jax.jit(_gathered).lower(given, ids).compile()
                donating = partial(jax.jit, donate_argnums=(0,))
                self._scatters[pool] = donating(_scattered).lower(given, ids, values).compile()

    def gather(self, units: Sequence[TierUnit]) -> ArrayGathered:
        """See ``PageMover``."""
        made = ArrayGathered()
        for pool, own in self._by_pool(units).items():
            given = tuple(self._arrays.state[i] for i in self._indices[pool])
            for some in batched(own, self._width(pool)):
                ids = self._ids(pool, [units[i].place for i in some], SINK)
                keys = [units[i].key for i in some]
                made.parts.append((keys, self._gathers[pool](given, ids)))
        return made

    def stage(self, units: Sequence[Unit]) -> ArrayStaged:
        """See ``PageMover``: the units are copied now, so their memory may be reused."""
        staged = ArrayStaged()
        for pool, own in self._by_pool(units).items():
            width = self._width(pool)
            for some in batched(own, width):
                padded = [*some, *some[-1:] * (width - len(some))]
                arrays = zip(*(units[i].arrays for i in padded), strict=True)
                staged.parts.append((pool, padded, tuple(np.stack(each) for each in arrays)))
        return staged

    def scatter(self, staged: ArrayStaged, units: Sequence[TierUnit]) -> None:
        """See ``PageMover``."""
        state = list(self._arrays.state)
        for pool, own, values in staged.parts:
            indices = self._indices[pool]
            ids = self._ids(pool, [units[i].place for i in own], SINK)
            made = self._scatters[pool](tuple(state[i] for i in indices), ids, values)
            for i, array in zip(indices, made, strict=True):
                state[i] = array
            self._arrays.state = tuple(state)

    @property
    def sink_bytes(self) -> int:
        """The bytes that ``copy_to_sink`` copies."""
        return WIDTH * self.forms[0].num_bytes

    def copy_to_sink(self) -> None:
        """Restore units of zeros to the page for padding, to measure the time that it takes."""
        zeros = tuple(np.zeros(shape, dtype) for shape, dtype in self.forms[0].arrays)
        key = bytes(DIGEST_SIZE)
        staged = self.stage([Unit(0, key, zeros)] * WIDTH)
        self.scatter(staged, [TierUnit(key, SINK)] * WIDTH)

    def _width(self, pool: int | None) -> int:
        return 1 if pool is None else WIDTH

    def _by_pool(self, units: Sequence[TierUnit] | Sequence[Unit]) -> dict[int | None, list[int]]:
        """The indices of the units of each pool, and of saved states."""
        found: dict[int | None, list[int]] = {}
        for i, unit in enumerate(units):
            group = group_of(unit.key)
            pool = None if group == SNAPSHOTS else self._limits.groups[group].pool
            found.setdefault(pool, []).append(i)
        return found

    def _ids(self, pool: int | None, places: Sequence[int], padding: int) -> np.ndarray:
        ids = np.full(self._width(pool), padding, np.int32)
        ids[: len(places)] = places
        return ids + self._first_snapshot if pool is None else ids


class ArrayGathered:
    """The results of gathers; see ``Gathered``."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[bytes], tuple[jax.Array, ...]]] = []

    @property
    def is_ready(self) -> bool:
        """True if all have been computed."""
        results: list[Any] = [array for _, arrays in self.parts for array in arrays]
        return all(array.is_ready() for array in results)

    def read(self) -> list[tuple[bytes, Arrays]]:
        """See ``Gathered``."""
        found: list[tuple[bytes, Arrays]] = []
        for keys, arrays in self.parts:
            host = [np.asarray(array) for array in arrays]  # on a CPU no copy
            found += [(key, tuple(array[i] for array in host)) for i, key in enumerate(keys)]
        return found


class ArrayStaged:
    """Stacked units of each call; see ``Staged``."""

    is_ready = True

    def __init__(self) -> None:
        # the pool, the indices of the units, and the arrays of a call
        self.parts: list[tuple[int | None, list[int], Arrays]] = []


def forms_of(program: Program) -> Forms:
    """The arrays of a unit of each group of a program."""
    abstract = program.state()
    forms = {
        pool: UnitForm(tuple((abstract[i].shape[1:], np.dtype(abstract[i].dtype)) for i in own))
        for pool, own in _indices(program).items()
    }
    pages = {number: forms[group.pool] for number, group in enumerate(program.limits.groups)}
    return pages | ({SNAPSHOTS: forms[None]} if None in forms else {})


def _indices(program: Program) -> dict[int | None, tuple[int, ...]]:
    """The indices of the arrays of each pool, and under None of those with rows of states."""
    found: dict[int | None, tuple[int, ...]] = {}
    for pool in (*range(len(program.limits.num_pages)), None):
        own = tuple(i for i, of in enumerate(program.model.state.pools) if of == pool)
        if own and (pool is not None or program.limits.num_snapshots):
            found[pool] = own
    return found


def _gathered(arrays: Any, ids: Any) -> Any:
    return tuple(array.at[ids].get(mode="promise_in_bounds") for array in arrays)


def _scattered(arrays: Any, ids: Any, values: Any) -> Any:
    return tuple(array.at[ids].set(own) for array, own in zip(arrays, values, strict=True))
