"""``PageMover``: copies units between the device's arrays and host memory, without waiting.

Calls are queued among the steps, so a gather reads what the steps before it have written, and what
a load writes is read by the steps after it. On a CPU the executables read and write host memory
(``ArrayMover``); a GPU has staging buffers and streams of its own (``exec.tiers.device_mover``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import batched
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.core.connector import Content, Forms, Unit, UnitForm
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.tiers import DIGEST_SIZE, SNAPSHOTS, TierUnit, group_of
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_arrays import DeviceArrays

WIDTH = 8  # pages of one call; those of fewer are padded
SINK = 0  # the page for padding


class Saving(Protocol):
    """Units on their way from the device."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Their keys."""
        ...

    @property
    def is_ready(self) -> bool:
        """True if the device has gathered them: then ``copy_to`` may be called, once."""
        ...

    def copy_to(self, memory: Sequence[Content | None]) -> None:
        """Begin to copy each unit to memory of its form; one with None is left out."""
        ...

    @property
    def is_copied(self) -> bool:
        """True if the memory has the units' content."""
        ...


class Loading(Protocol):
    """Units on their way to the device."""

    def advance(self) -> bool:
        """Go on; True if steps that are launched from now on find all units in their places."""
        ...

    def drop(self) -> None:
        """Write to no place any more."""
        ...


class PageMover(Protocol):
    """Copies units between the device's arrays and host memory."""

    @property
    def forms(self) -> Forms:
        """The arrays of a unit of each group."""
        ...

    def gather(self, units: Sequence[TierUnit]) -> Saving:
        """Queue a copy of what these places hold before the next step."""
        ...

    def gathered_bytes(self, units: Sequence[TierUnit]) -> int:
        """Bytes of the device that ``gather`` of these units takes until they are copied."""
        ...

    def load(self, units: Sequence[Unit], places: Sequence[TierUnit]) -> Loading:
        """Begin to copy units to these places; their memory is unchanged until it has ended."""
        ...

    def settle(self) -> None:
        """Wait for all copies to and from host memory; keep no memory of the device for others."""
        ...


class Pools:
    """A program's arrays of layer state by pool; rows of saved states are the pool None."""

    def __init__(self, program: Program) -> None:
        self._limits = program.limits
        self._first_snapshot = program.limits.max_num_seqs + 1  # after rows of slots and padding
        self.indices, self.abstract = _indices(program), program.state()
        self.forms: Forms = forms_of(program)

    def given(self, pool: int | None) -> tuple[Any, ...]:
        """The shapes of a pool's arrays."""
        return tuple(self.abstract[i] for i in self.indices[pool])

    def form(self, pool: int | None) -> UnitForm:
        """The form of its units."""
        if pool is None:
            return self.forms[SNAPSHOTS]
        groups = enumerate(self._limits.groups)
        return next(self.forms[number] for number, group in groups if group.pool == pool)

    def split(self, units: Sequence[TierUnit] | Sequence[Unit]) -> dict[int | None, list[int]]:
        """The indices of the units of each pool."""
        found: dict[int | None, list[int]] = {}
        for i, unit in enumerate(units):
            group = group_of(unit.key)
            pool = None if group == SNAPSHOTS else self._limits.groups[group].pool
            found.setdefault(pool, []).append(i)
        return found

    def padded_bytes(self, units: Sequence[TierUnit], widths: Mapping[int | None, int]) -> int:
        """Bytes of units that are gathered so many of a pool at a time, with padding."""
        return sum(
            cdiv(len(own), widths[pool]) * widths[pool] * self.form(pool).num_bytes
            for pool, own in self.split(units).items()
        )

    def rows(self, pool: int | None, places: Sequence[int], width: int) -> np.ndarray:
        """The rows of a pool's arrays: int32[width], padded with those for padding."""
        if pool is None:
            places = [place + self._first_snapshot for place in places]
        ids = np.full(width, self._first_snapshot - 1 if pool is None else SINK, np.int32)
        ids[: len(places)] = places
        return ids


class ArrayMover:
    """A ``PageMover`` with an executable for each pool, and one for saved states.

    On several devices a unit has the parts of all of them, as the arrays of the layer state have.
    """

    def __init__(self, program: Program, arrays: DeviceArrays) -> None:
        self._arrays, self._pools = arrays, Pools(program)
        self.forms = self._pools.forms
        self._gathers: dict[int | None, Any] = {}
        self._scatters: dict[int | None, Any] = {}
        place = program.placement
        with place.as_default():
            for pool in self._pools.indices:
                width, given = self._width(pool), self._pools.given(pool)
                ids = place.abstract((width,), np.int32)
                values = tuple(
                    jax.ShapeDtypeStruct((width, *a.shape[1:]), a.dtype, sharding=a.sharding)
                    for a in given
                )
                divided = tuple(a.sharding for a in given) if place.num_devices > 1 else None
                gather = jax.jit(_gathered, out_shardings=divided)
                self._gathers[pool] = gather.lower(given, ids).compile()
                scatter = jax.jit(_scattered, donate_argnums=(0,), out_shardings=divided)
                self._scatters[pool] = scatter.lower(given, ids, values).compile()

    def gather(self, units: Sequence[TierUnit]) -> ArraySaving:
        """See ``PageMover``."""
        made = ArraySaving()
        for pool, own in self._pools.split(units).items():
            given = tuple(self._arrays.state[i] for i in self._pools.indices[pool])
            width, form = self._width(pool), self._pools.form(pool)
            for some in batched(own, width):
                ids = self._pools.rows(pool, [units[i].place for i in some], width)
                keys = [units[i].key for i in some]
                made.parts.append((keys, form, self._gathers[pool](given, ids)))
        return made

    def gathered_bytes(self, units: Sequence[TierUnit]) -> int:
        """See ``PageMover``."""
        widths = {pool: self._width(pool) for pool in self._pools.indices}
        return self._pools.padded_bytes(units, widths)

    def load(self, units: Sequence[Unit], places: Sequence[TierUnit]) -> ArrayLoading:
        """See ``PageMover``: the units are copied now."""
        for pool, own in self._pools.split(units).items():
            width, indices = self._width(pool), self._pools.indices[pool]
            form = self._pools.form(pool)
            for some in batched(own, width):
                padded = [*some, *some[-1:] * (width - len(some))]
                views = [form.views(units[i].content) for i in padded]
                values = tuple(np.stack(each) for each in zip(*views, strict=True))
                ids = self._pools.rows(pool, [places[i].place for i in padded], width)
                given = tuple(self._arrays.state[i] for i in indices)
                self._arrays.replace(indices, self._scatters[pool](given, ids, values))
        return ArrayLoading()

    def settle(self) -> None:
        """See ``PageMover``: nothing is under way."""

    @property
    def most_measured(self) -> int:
        """The units of a long load, for ``copy_to_sink``."""
        return WIDTH

    def copy_to_sink(self, count: int) -> None:
        """Load units of zeros to the page for padding, to measure the time that it takes."""
        zeros = np.zeros(self.forms[0].num_bytes, np.uint8)
        key = bytes(DIGEST_SIZE)
        self.load([Unit(0, key, zeros)] * count, [TierUnit(key, SINK)] * count)
        jax.block_until_ready(self._arrays.state)

    def _width(self, pool: int | None) -> int:
        return 1 if pool is None else WIDTH


class ArraySaving:
    """The results of gathers; see ``Saving``."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[bytes], UnitForm, tuple[jax.Array, ...]]] = []
        self.is_copied = False

    @property
    def keys(self) -> list[bytes]:
        """See ``Saving``."""
        return [key for keys, _, _ in self.parts for key in keys]

    @property
    def is_ready(self) -> bool:
        """See ``Saving``."""
        results: list[Any] = [array for _, _, arrays in self.parts for array in arrays]
        return all(array.is_ready() for array in results)

    def copy_to(self, memory: Sequence[Content | None]) -> None:
        """See ``Saving``: it ends at once."""
        found = iter(memory)
        for keys, form, arrays in self.parts:
            host = [np.asarray(array) for array in arrays]  # on a CPU no copy
            for i, content in enumerate([next(found) for _ in keys]):
                views = () if content is None else form.views(content)
                for to, array in zip(views, host, strict=False):
                    np.copyto(to, array[i])
        self.is_copied = True


class ArrayLoading:
    """Units that have been written; see ``Loading``."""

    def advance(self) -> bool:
        """See ``Loading``."""
        return True

    def drop(self) -> None:
        """See ``Loading``."""


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
