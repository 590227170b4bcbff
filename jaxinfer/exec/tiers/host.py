"""``HostTier``: units in host memory, in which the least recently used ones are replaced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.core.connector import Content, Forms, Polled, Unit


class Slabs:
    """Divides memory into slabs of the size of the largest unit, each for units of one size."""

    def __init__(self, largest: int) -> None:
        self.slab_bytes = largest
        self._memory: list[np.ndarray] = []  # uint8[slab_bytes] of each slab
        self._empty: list[int] = []  # numbers of slabs
        self._free: dict[int, list[int]] = {}  # by size: offsets, counted over all slabs
        self._used: dict[int, int] = {}  # by slab in use: its units

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return len(self._memory) * self.slab_bytes

    def add(self, memory: np.ndarray) -> None:  # uint8[bytes]
        """Add memory; what is left behind the last whole slab is not used."""
        first, size = len(self._memory), self.slab_bytes
        count = len(memory) // size
        self._memory += [memory[i * size : (i + 1) * size] for i in range(count)]
        self._empty = [*reversed(range(first, first + count)), *self._empty]

    def at(self, offset: int, size: int) -> np.ndarray:  # uint8[size]
        """The memory of a unit."""
        slab, start = divmod(offset, self.slab_bytes)
        return self._memory[slab][start : start + size]

    def take(self, size: int) -> int | None:
        """The offset of memory for a unit; None if there is none."""
        free = self._free.setdefault(size, [])
        if not free:
            if not self._empty:
                return None
            slab = self._empty.pop()
            start = slab * self.slab_bytes
            free += range(start, start + self.slab_bytes // size * size, size)
        offset = free.pop()
        slab = offset // self.slab_bytes
        self._used[slab] = self._used.get(slab, 0) + 1
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a unit's memory; a slab without units may be of another size again."""
        slab = offset // self.slab_bytes
        self._used[slab] -= 1
        self._free[size].append(offset)
        if not self._used[slab]:
            del self._used[slab]
            own = self._free[size]
            self._free[size] = [other for other in own if other // self.slab_bytes != slab]
            self._empty.append(slab)


@dataclass(eq=False, slots=True)
class Entry:
    """A unit, and the number of loads that read it. It is kept until they are finished."""

    unit: Unit
    offset: int
    pins: int = 0
    is_saved: bool = False
    is_dropped: bool = False


class Memory(Protocol):
    """A source of memory that takes long to allocate."""

    def taken(self) -> Sequence[np.ndarray]:  # uint8[bytes] each
        """Pieces that have been allocated since the last call."""
        ...

    def close(self) -> None:
        """Allocate no more."""
        ...


class HostTier:
    """A ``Connector`` whose units are in host memory; all calls end at once."""

    is_shared = False

    def __init__(self, num_bytes: int, forms: Forms, memory: Memory | None = None) -> None:
        """``memory``: where its memory comes from; as it is asked for, if None."""
        self._forms, self._more = forms, memory
        self._slabs = Slabs(max(form.num_bytes for form in forms.values()))
        if memory is None:
            self._slabs.add(np.empty(num_bytes, np.uint8))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._loads: dict[int, list[Entry]] = {}
        self._polled = Polled()
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The size of the tier, as far as it has its memory."""
        self._take_memory()
        return self._slabs.num_bytes

    @property
    def keys(self) -> list[bytes]:
        """The keys of all units, the least recently used first."""
        return [key for key, entry in self._entries.items() if entry.is_saved]

    @property
    def num_pinned(self) -> int:
        """Units that loads read."""
        return sum(map(len, self._loads.values()))

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """See ``Connector``."""
        found = ((key, self._entries.get(key)) for key in keys)
        return [key for key, entry in found if entry is not None and entry.is_saved]

    def reserve(self, group: int, key: bytes) -> Content | None:
        """See ``Connector``: units that were used longest ago are replaced."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return None
        form = self._forms[group]
        self._take_memory()
        while (offset := self._slabs.take(form.num_bytes)) is None:
            if not self._replace_one():
                return None
        content = self._slabs.at(offset, form.num_bytes)
        self._entries[key] = Entry(Unit(group, key, content), offset)
        self.used_bytes += form.num_bytes
        return content

    def save(self, unit: Unit) -> bool:
        """See ``Connector``: content that is not in memory of ``reserve`` is copied."""
        if unit.key not in self._entries:
            if (memory := self.reserve(unit.group, unit.key)) is None:
                return False
            np.copyto(memory, unit.content)
        self._entries[unit.key].is_saved = True
        self._polled.saved.append(unit)
        self._polled.added.append(unit.key)
        return True

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        """See ``Connector``."""
        known = [self._entries.get(key) for key in keys]
        found = [entry if entry is not None and entry.is_saved else None for entry in known]
        pinned = [entry for entry in found if entry is not None]
        for entry in pinned:
            entry.pins += 1
            self._entries.move_to_end(entry.unit.key)
        self._loads[ticket] = pinned
        self._polled.loaded[ticket] = [entry and entry.unit for entry in found]

    def poll(self, seconds: float = 0.0) -> Polled:
        """See ``Connector``."""
        del seconds  # nothing happens later
        polled, self._polled = self._polled, Polled()
        return polled

    def finished(self, ticket: int) -> None:
        """See ``Connector``."""
        self._polled.loaded.pop(ticket, None)
        for entry in self._loads.pop(ticket, ()):
            entry.pins -= 1
            if entry.is_dropped and not entry.pins:
                self._free(entry)

    def clear(self, version: bytes) -> None:
        """See ``Connector``."""
        del version  # no unit of another one is left
        for entry in self._entries.values():
            entry.is_dropped = True
            if not entry.pins:
                self._free(entry)
        self._entries.clear()
        self._polled = Polled(loaded=self._polled.loaded)

    def close(self) -> None:
        """See ``Connector``."""
        if self._more is not None:
            self._more.close()

    def _take_memory(self) -> None:
        """Add memory that has been allocated since the last call."""
        for memory in () if self._more is None else self._more.taken():
            self._slabs.add(memory)

    def _replace_one(self) -> bool:
        """Drop the least recently used unit that nothing reads; False if there is none."""
        for key, entry in self._entries.items():
            if entry.is_saved and not entry.pins:
                del self._entries[key]
                self._free(entry)
                self._polled.removed.append(key)
                return True
        return False

    def _free(self, entry: Entry) -> None:
        size = self._forms[entry.unit.group].num_bytes
        self._slabs.give_back(entry.offset, size)
        self.used_bytes -= size
