"""``DiskTier``: units in files of a folder, which a later engine of the same model reads again."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxinfer.core.connector import Content, Forms, Polled, Unit
from jaxinfer.core.tiers import group_of
from jaxinfer.exec.tiers.page_file import (
    DamagedUnit,
    file_size,
    parsed_name,
    path_of,
    read_unit,
    write_unit,
)

LOGGER = "jaxinfer.tiers"
MAX_WRITES = 64  # units that wait to be written; others are not kept
NUM_READERS = 2
UNITS = "units"  # the folder of the files


@dataclass(frozen=True)
class Write:
    """A unit to be written, and the number of the ``clear`` before it."""

    unit: Unit
    generation: int


@dataclass(frozen=True)
class Remove:
    """Files of units that have been dropped."""

    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Read:
    """A load."""

    ticket: int
    keys: tuple[bytes, ...]
    generation: int


class DiskTier:
    """A ``Connector`` whose units are in files. Threads read and write them.

    If a write fails, for example as the disk is full, there is one warning and nothing is written
    any more. A unit that cannot be read, or whose checksum differs, is removed.
    """

    is_shared = False

    def __init__(self, folder: Path, num_bytes: int, forms: Forms, lock: IO[str]) -> None:
        """``lock``: that of the folder (``disk_folder.opened``), which ``close`` closes."""
        self._file_lock = lock
        self._folder, self.num_bytes, self._forms = folder / UNITS, num_bytes, forms
        self._lock = threading.Condition()
        # all below are changed with the lock
        self._index: OrderedDict[bytes, int] = OrderedDict()  # sizes; least recently used first
        self.used_bytes = 0
        self._polled = Polled()
        self._writes: deque[Write | Remove] = deque()
        self._reads: deque[Read] = deque()
        self._reading: dict[bytes, int] = {}  # loads of each key
        self._live: set[int] = set()  # tickets that are not finished
        self._queued: set[bytes] = set()  # keys of units that wait to be written
        self._version, self._generation = b"", 0
        self._is_full = self._closes = False
        self._find_units()
        tasks = (self._write_all, *[self._read_all] * NUM_READERS)
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """See ``Connector``."""
        with self._lock:
            return [key for key in keys if key in self._index]

    def reserve(self, group: int, key: bytes) -> Content | None:
        """See ``Connector``."""
        with self._lock:
            known = key in self._index or key in self._queued
            return None if known or self._is_full else self._forms[group].new()

    def save(self, unit: Unit) -> bool:
        """See ``Connector``: a unit is not kept if too many wait to be written."""
        with self._lock:
            if unit.key in self._index or unit.key in self._queued:
                return False
            too_large = file_size(self._forms[unit.group]) > self.num_bytes
            if self._is_full or too_large or len(self._queued) >= MAX_WRITES:
                return False
            self._queued.add(unit.key)
            self._writes.append(Write(unit, self._generation))
            self._lock.notify_all()
            return True

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        """See ``Connector``."""
        with self._lock:
            self._live.add(ticket)
            for key in keys:
                self._reading[key] = self._reading.get(key, 0) + 1
            self._reads.append(Read(ticket, tuple(keys), self._generation))
            self._lock.notify_all()

    def poll(self, seconds: float = 0.0) -> Polled:
        """See ``Connector``."""
        with self._lock:
            if seconds:
                self._lock.wait_for(lambda: bool(self._polled), seconds)
            polled, self._polled = self._polled, Polled()
            return polled

    def finished(self, ticket: int) -> None:
        """See ``Connector``: a load that has not begun is left out."""
        with self._lock:
            self._live.discard(ticket)
            self._polled.loaded.pop(ticket, None)

    def clear(self, version: bytes) -> None:
        """See ``Connector``: a thread removes the files, before it writes others."""
        with self._lock:
            paths = tuple(self._path(key) for key in self._index)
            self._generation += 1
            self._writes.clear()
            self._writes.append(Remove(paths))
            self._queued.clear()
            self._index.clear()
            self.used_bytes, self._version = 0, version
            self._polled = Polled(loaded=self._polled.loaded)
            self._lock.notify_all()

    def close(self) -> None:
        """See ``Connector``: units that wait are written first."""
        with self._lock:
            self._closes = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        self._file_lock.close()

    def _path(self, key: bytes) -> Path:
        return path_of(self._folder, key, self._version)

    def _find_units(self) -> None:
        """Find the units of earlier engines, the oldest first, and remove files that are none, and
        the oldest ones if the tier was larger.

        Their content is checked when it is read.
        """
        found: list[tuple[float, bytes, int]] = []
        for path in sorted(self._folder.glob("??/*")):
            if path.is_dir():
                continue  # not of a tier
            name, status = parsed_name(path.name), path.stat()
            form = None if name is None else self._forms.get(group_of(name.key))
            fits = form is not None and status.st_size == file_size(form)
            if name is None or name.version or not fits:
                path.unlink(missing_ok=True)  # half of a file, or of weights that have changed
            else:
                found.append((status.st_mtime, name.key, status.st_size))
        for _, key, size in sorted(found):
            self._index[key] = size
            self.used_bytes += size
        self._writes.append(Remove(tuple(self._make_space(0))))
        self._polled = Polled(added=[*self._index])

    def _write_all(self) -> None:
        while (task := self._next(self._writes)) is not None:
            match task:
                case Remove():
                    for path in task.paths:
                        path.unlink(missing_ok=True)
                case Write():
                    self._write(task)

    def _write(self, task: Write) -> None:
        unit, size = task.unit, file_size(self._forms[task.unit.group])
        with self._lock:
            if task.generation != self._generation:
                return
            version, path, removed = self._version, self._path(unit.key), self._make_space(size)
        partial = None
        try:
            for old in removed:
                old.unlink(missing_ok=True)
            partial = write_unit(path, unit, version)
        except OSError as error:
            self._stop_writing(error)
        with self._lock:
            if task.generation != self._generation:
                if partial is not None:
                    partial.unlink(missing_ok=True)
                return
            if partial is not None and self._renamed(partial, path):
                self._index[unit.key] = size
                self.used_bytes += size
                self._polled.added.append(unit.key)
            self._queued.discard(unit.key)
            self._polled.saved.append(unit)
            self._lock.notify_all()

    def _renamed(self, partial: Path, path: Path) -> bool:
        try:
            partial.rename(path)
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    def _make_space(self, size: int) -> list[Path]:
        """Drop the least recently used units that nothing reads; returns their files."""
        removed: list[Path] = []
        for key in tuple(self._index) if self.used_bytes + size > self.num_bytes else ():
            if self.used_bytes + size <= self.num_bytes:
                break
            if key not in self._reading:
                removed.append(self._path(key))
                self._drop(key)
        return removed

    def _drop(self, key: bytes) -> None:
        self.used_bytes -= self._index.pop(key)
        self._polled.removed.append(key)

    def _stop_writing(self, error: OSError) -> None:
        with self._lock:
            first, self._is_full = not self._is_full, True
        if first:
            words = "the disk tier in %s saves no more pages (%s); free some space and start again"
            logging.getLogger(LOGGER).warning(words, self._folder.parent, error)

    def _read_all(self) -> None:
        while (task := self._next(self._reads)) is not None:
            units = [self._read(key, task) for key in task.keys]
            with self._lock:
                for key in task.keys:
                    self._reading[key] -= 1
                    if not self._reading[key]:
                        del self._reading[key]
                if task.ticket in self._live:
                    self._polled.loaded[task.ticket] = units
                self._lock.notify_all()

    def _read(self, key: bytes, task: Read) -> Unit | None:
        with self._lock:
            is_known = key in self._index and task.generation == self._generation
            if not is_known or task.ticket not in self._live:
                return None
            self._index.move_to_end(key)
            path, version = self._path(key), self._version
        try:
            return read_unit(path, key, version, self._forms[group_of(key)])
        except (DamagedUnit, OSError) as error:
            words = "a page of the disk tier is computed again: %s"
            logging.getLogger(LOGGER).warning(words, error)
            with self._lock:
                if task.generation == self._generation and key in self._index:
                    self._drop(key)
                    path.unlink(missing_ok=True)
            return None

    def _next[Task](self, queue: deque[Task]) -> Task | None:
        """The next task of a thread; None if there will be no more."""
        with self._lock:
            self._lock.wait_for(lambda: queue or self._closes)
            return queue.popleft() if queue else None
