"""Snapshots: copies of a sequence's state from which another one with the same prefix starts.

A layer with state for each sequence (``LayerState.per_slot``) keeps only its newest value, so a
prefix can be reused only at page borders where that value was copied. A snapshot is a row of the
device's arrays, after the rows of the slots. Its key is the hash of the page that ends at its
border (``sched.prefix``). A row is in exactly one of three states:

- free;
- pending: a step in flight copies a slot to it (``ScheduledSeq.snapshot``); when the step is
  reported, the row is registered, or freed if the step failed or its sequence is not running;
- registered, until its row is needed for another snapshot.

A snapshot is useless while no page is registered with its hash, so such rows are taken first, then
the least recently used. If the same tokens are computed again, the page gets the same hash and the
snapshot is useful again.

Rows are reused as soon as they are registered or free, while steps in flight may still read or
write them. That is safe for the same reason as for pages (``Draft.remove``): the device runs calls
in launch order. A step restores its slots before it computes and saves them afterwards, so a row
that one plan both restores and overwrites is read first.

Owns: ``SnapshotPool`` (a frozen value) and ``SnapshotWriter`` (its next value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import msgspec
from immutables import Map


class SnapshotPool(msgspec.Struct, frozen=True):
    """The free and registered rows; pending ones are in the plans in flight."""

    free: tuple[int, ...]
    by_hash: Map[bytes, tuple[int, int]]  # page hash -> (row, time of last use)
    clock: int = 0  # the time: the number of uses so far


def new_snapshots(count: int) -> SnapshotPool:
    """A pool in which all rows are free."""
    return SnapshotPool(tuple(reversed(range(count))), Map())


class SnapshotWriter:
    """Builds the next ``SnapshotPool``."""

    def __init__(self, pool: SnapshotPool) -> None:
        self._free = pool.free
        self._by_hash = pool.by_hash
        self._clock = pool.clock

    def last_within(self, page_hashes: Items[bytes]) -> int:
        """The length, in pages, of the longest prefix of these pages with a snapshot, or 0."""
        known = (i for i in range(len(page_hashes), 0, -1) if page_hashes[i - 1] in self._by_hash)
        return next(known, 0)

    def use(self, page_hash: bytes) -> int:
        """The row of a registered snapshot, which becomes the most recently used."""
        row, _ = self._by_hash[page_hash]
        self._put(page_hash, row)
        return row

    def take(self, has_page: Callable[[bytes], bool]) -> int | None:
        """A row for a new snapshot; None if all are pending.

        ``has_page`` is whether a page is registered with a hash.
        """
        if self._free:
            row, self._free = self._free[-1], self._free[:-1]
            return row
        if not self._by_hash:
            return None
        oldest = min(self._by_hash, key=lambda key: (has_page(key), self._by_hash[key][1]))
        row, _ = self._by_hash[oldest]
        self._by_hash = self._by_hash.delete(oldest)
        return row

    def release(self, rows: Iterable[int]) -> None:
        """Free the rows of a step that has been reported."""
        self._free = (*self._free, *rows)

    def register(self, row: int, page_hash: bytes) -> None:
        """Set the hash of a row that was just released, unless another row has it."""
        if page_hash not in self._by_hash:
            self._free = tuple([free for free in self._free if free != row])
            self._put(page_hash, row)

    def finish(self) -> SnapshotPool:
        """The next value; the writer must not be used afterwards."""
        return SnapshotPool(self._free, self._by_hash, self._clock)

    def _put(self, page_hash: bytes, row: int) -> None:
        self._by_hash = self._by_hash.set(page_hash, (row, self._clock))
        self._clock += 1
