"""Tiers for ``Drive``: a mover over the fake executor's shadow of pages, and connectors that fail.

A unit of pages is the digests of its entries, one of a saved state the digest of its tokens. So a
unit that is saved too late, restored to a wrong place, or of another prefix is an error at once,
when a row reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.core.connector import Connector, Content, Forms, Polled, Unit, UnitForm
from jaxinfer.core.limits import Limits
from jaxinfer.core.tiers import SNAPSHOTS, TierUnit, group_of
from jaxinfer.exec.tiers.mover import ArrayLoading
from kit.fake_executor import FakeExecutor


class FakeMover:
    """A ``PageMover``: a copy is made when it is queued, as steps run when they are launched."""

    def __init__(
        self, limits: Limits, executor: Callable[[], FakeExecutor], num_looks: int = 0
    ) -> None:
        """``num_looks``: at a save, before it is ready, and again before it is copied."""
        self._limits, self._executor, self._num_looks = limits, executor, num_looks
        page = UnitForm((((limits.page_size,), np.dtype(np.int64)),))
        forms = dict.fromkeys(range(len(limits.groups)), page)
        if limits.num_snapshots:
            forms[SNAPSHOTS] = UnitForm((((), np.dtype(np.int64)),))
        self.forms: Forms = forms

    def gather(self, units: Sequence[TierUnit]) -> FakeSaving:
        """Copy what the places hold."""
        found = [(unit.key, self._content(unit).copy()) for unit in units]
        return FakeSaving(found, self._num_looks)

    def gathered_bytes(self, units: Sequence[TierUnit]) -> int:
        """Without padding."""
        return sum(self.forms[group_of(unit.key)].num_bytes for unit in units)

    def load(self, units: Sequence[Unit], places: Sequence[TierUnit]) -> ArrayLoading:
        """Write units to their places."""
        for place, unit in zip(places, units, strict=True):
            array = unit.content.view(np.int64)
            if group_of(place.key) == SNAPSHOTS:
                self._executor().snapshots[place.place] = int(array[0])
            else:
                self._content(place)[:] = array
        return ArrayLoading()

    def settle(self) -> None:
        """Nothing is under way."""

    def _content(self, unit: TierUnit) -> np.ndarray:
        fake = self._executor()
        if (group := group_of(unit.key)) == SNAPSHOTS:
            return np.array(fake.snapshots[unit.place], np.int64)
        pool, size = self._limits.groups[group].pool, self._limits.page_size
        if len(fake.stores[pool]) < self._limits.num_pages[pool] * size:
            missing = self._limits.num_pages[pool] * size - len(fake.stores[pool])
            fake.stores[pool] = np.append(fake.stores[pool], np.zeros(missing, np.int64))
        return fake.stores[pool][unit.place * size : (unit.place + 1) * size]


class FakeSaving:
    """Units that have been gathered."""

    def __init__(self, units: list[tuple[bytes, np.ndarray]], num_looks: int) -> None:
        self._units = units
        self._copies: list[tuple[tuple[bytes, np.ndarray], Content | None]] = []
        self._left = [num_looks, num_looks]
        self.keys = [key for key, _ in units]

    @property
    def is_ready(self) -> bool:
        """True at last."""
        self._left[0] -= 1
        return self._left[0] < 0

    @property
    def is_copied(self) -> bool:
        """True at last; before it the memory has other content."""
        self._left[1] -= 1
        if self._left[1] == -1:
            for (_, array), to in self._copies:
                if to is not None:
                    to.view(np.int64)[:] = array
        return self._left[1] < 0

    def copy_to(self, memory: Sequence[Content | None]) -> None:
        """Copy them when ``is_copied``."""
        self._copies = list(zip(self._units, memory, strict=True))


class Unreliable:
    """A connector around another one: loads end late and in any order, and some units fail."""

    def __init__(self, inner: Connector, seed: int, slowness: int, failures: float) -> None:
        self._inner, self._draw = inner, random.Random(seed)
        self._slowness, self._failures = slowness, failures
        self._late: dict[int, tuple[int, list[Unit | None]]] = {}  # polls left
        self.num_failed = 0

    is_shared = False

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._inner.match(keys)

    def reserve(self, group: int, key: bytes) -> Content | None:
        return self._inner.reserve(group, key)

    def save(self, unit: Unit) -> bool:
        return self._inner.save(unit)

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        self._inner.load(ticket, keys)

    def poll(self, seconds: float = 0.0) -> Polled:
        polled = self._inner.poll()
        for ticket, units in polled.loaded.items():
            failed = [self._draw.random() < self._failures for _ in units]
            self.num_failed += sum(failed)
            left = [None if one else unit for one, unit in zip(failed, units, strict=True)]
            polls = 0 if seconds else self._draw.randint(0, self._slowness)
            self._late[ticket] = polls, left
        polled.loaded = {}
        for ticket, (polls, units) in tuple(self._late.items()):
            if polls and not seconds:
                self._late[ticket] = polls - 1, units
            else:
                polled.loaded[ticket] = self._late.pop(ticket)[1]
        return polled

    def finished(self, ticket: int) -> None:
        self._late.pop(ticket, None)
        self._inner.finished(ticket)

    def clear(self, version: bytes) -> None:
        self._inner.clear(version)

    def close(self) -> None:
        self._inner.close()
