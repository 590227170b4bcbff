"""The snapshots: copies of a sequence's state, so that another can go on behind the same prefix.

A layer with state for each sequence (``LayerState.per_slot``) keeps only its newest value, so a
prefix can be reused at the page borders where that value was copied, and nowhere else. A snapshot
is a row of the device's arrays behind those of the slots, named like the page that ends at its
border (``sched.prefix``). A row is in exactly one place:

- free;
- pending: a step in flight copies a slot to it (``ScheduledSeq.snapshot``); when the step is
  reported, the row is named, or free if its sequence is gone or has failed;
- named, until another snapshot needs the row.

A name whose page the index does not know is of no use, so its row is taken first; then the least
recently used. If the same tokens are computed once more, the page gets the same name, and the
snapshot is of use again.

Rows are reused as soon as they are named or free, while steps in flight may still read or write
them. That is safe for the reason that pages are (``Draft.remove``): the device runs calls in launch
order. A step restores its slots before it computes and saves them after it, so a row that a plan
both restores and gives to another is read first.

Owns: ``SnapshotPool`` (a frozen value) and ``SnapshotWriter`` (its next value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import msgspec
from immutables import Map


class SnapshotPool(msgspec.Struct, frozen=True):
    """Where every row is, except the pending ones, which the plans in flight name."""

    free: tuple[int, ...]
    by_hash: Map[bytes, tuple[int, int]]  # page hash -> the row, and when it was used last
    clock: int = 0  # a number that grows with each use


def new_snapshots(count: int) -> SnapshotPool:
    """All rows free."""
    return SnapshotPool(tuple(reversed(range(count))), Map())


class SnapshotWriter:
    """Builds the next ``SnapshotPool``."""

    def __init__(self, pool: SnapshotPool) -> None:
        self._free = pool.free
        self._by_hash = pool.by_hash
        self._clock = pool.clock

    def last_within(self, page_hashes: Items[bytes]) -> int:
        """The largest number of these pages behind which there is a snapshot, or 0."""
        known = (i for i in range(len(page_hashes), 0, -1) if page_hashes[i - 1] in self._by_hash)
        return next(known, 0)

    def use(self, page_hash: bytes) -> int:
        """The row of a snapshot that exists, which is now the most recently used."""
        row, _ = self._by_hash[page_hash]
        self._put(page_hash, row)
        return row

    def take(self, knows: Callable[[bytes], bool]) -> int | None:
        """A row for a new snapshot; None when all are pending. ``knows``: of the page index."""
        if self._free:
            row, self._free = self._free[-1], self._free[:-1]
            return row
        if not self._by_hash:
            return None
        oldest = min(self._by_hash, key=lambda name: (knows(name), self._by_hash[name][1]))
        row, _ = self._by_hash[oldest]
        self._by_hash = self._by_hash.delete(oldest)
        return row

    def release(self, rows: Iterable[int]) -> None:
        """Free the rows of a step that has been reported."""
        self._free = (*self._free, *rows)

    def register(self, row: int, page_hash: bytes) -> None:
        """Name a row that was just released, unless another has the name."""
        if page_hash not in self._by_hash:
            self._free = tuple([free for free in self._free if free != row])
            self._put(page_hash, row)

    def finish(self) -> SnapshotPool:
        """The next value; the writer must not be used afterwards."""
        return SnapshotPool(self._free, self._by_hash, self._clock)

    def _put(self, page_hash: bytes, row: int) -> None:
        self._by_hash = self._by_hash.set(page_hash, (row, self._clock))
        self._clock += 1
