"""Snapshots: saved states of a sequence from which another one with the same prefix starts.

A layer with state for each sequence (``LayerState.per_slot``) keeps only its newest value, so a
prefix can be reused only at page borders where that value was saved. A snapshot is a row of the
device's arrays, after the rows of the slots. The step whose chunk passes a border saves it, and so
does one that decodes up to a border: the next turn of a chat, or the sequence after a preemption,
starts near the end of the answer. Its key is the hash of the page that ends at its border
(``sched.prefix``). A row is in exactly one of three states:

- free;
- pending: a step in flight saves a state in it (``ScheduledSeq.saves``); when the step is reported,
  the row is registered, or freed if the step failed or its sequence is not running;
- registered, until its row is needed for another snapshot.

A snapshot is useless while no page is registered with its hash, so such rows are taken first, then
the least recently used. If the same tokens are computed again, the page gets the same hash and the
snapshot is useful again.

Rows are reused as soon as they are registered or free, while steps in flight may still read or
write them. That is safe for the same reason as for pages (``Draft.remove``): the device runs calls
in launch order. Within a step there is no order: a kernel may write the snapshot of one row before
it reads that of another. So a plan does not take a row from which one of its own rows starts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import msgspec
from immutables import Map
from msgspec.structs import replace


def new_snapshots(num_rows: int) -> SnapshotPool:
    """A pool of which all rows are free."""
    return SnapshotPool(tuple(reversed(range(num_rows))))


class Snapshot(NamedTuple):
    """A registered row: the time of its last use, and whether it has been offered to tiers."""

    row: int
    used: int
    is_offered: bool = False


class SnapshotPool(msgspec.Struct, frozen=True):
    """The free and registered rows; pending ones are in the plans in flight.

    A method that changes something returns the next pool.
    """

    free: tuple[int, ...]
    by_hash: Map[bytes, Snapshot] = Map()
    clock: int = 0  # the time: the number of uses so far

    def last_within(self, page_hashes: Items[bytes]) -> int:
        """The length, in pages, of the longest prefix of these pages with a snapshot, or 0."""
        known = (i for i in range(len(page_hashes), 0, -1) if page_hashes[i - 1] in self.by_hash)
        return next(known, 0)

    def use(self, page_hash: bytes) -> tuple[int, SnapshotPool]:
        """The row of a registered snapshot, which becomes the most recently used."""
        known = self.by_hash[page_hash]
        return known.row, self._put(page_hash, known)

    def take(
        self, has_page: Callable[[bytes], bool], restored: Container[int] = ()
    ) -> tuple[int | None, SnapshotPool]:
        """A row for a new snapshot, but none of ``restored``; None if all others are pending.

        ``has_page`` is whether a page is registered with a hash.
        """
        if self.free:
            return self.free[-1], replace(self, free=self.free[:-1])
        left = [key for key, known in self.by_hash.items() if known.row not in restored]
        if not left:
            return None, self
        oldest = min(left, key=lambda key: (has_page(key), self.by_hash[key].used))
        return self.by_hash[oldest].row, replace(self, by_hash=self.by_hash.delete(oldest))

    def release(self, rows: Iterable[int]) -> SnapshotPool:
        """Free the rows of a step that has been reported."""
        return replace(self, free=(*self.free, *rows))

    def register(self, row: int, page_hash: bytes) -> SnapshotPool:
        """Set the hash of a row that was just released, unless another row has it."""
        if page_hash in self.by_hash:
            return self
        free = tuple([other for other in self.free if other != row])
        return replace(self._put(page_hash, Snapshot(row, 0)), free=free)

    def offer(self, least: int, most: int) -> tuple[list[tuple[bytes, int]], SnapshotPool]:
        """Up to ``most`` rows, the least recently used first, that were not offered before.

        There are none if ``least`` rows are free or have been offered. Returns hashes and rows.
        """
        new = [(known.used, key) for key, known in self.by_hash.items() if not known.is_offered]
        count = min(most, least - len(self.free) - (len(self.by_hash) - len(new)))
        if not new or count <= 0:
            return [], self
        by_hash, found = self.by_hash.mutate(), list[tuple[bytes, int]]()
        for _, key in sorted(new)[:count]:
            by_hash[key] = self.by_hash[key]._replace(is_offered=True)
            found.append((key, by_hash[key].row))
        return found, replace(self, by_hash=by_hash.finish())

    def offers(self, least: int) -> bool:
        """True if there are rows to offer."""
        num_new = sum(not known.is_offered for known in self.by_hash.values())
        return num_new > 0 and len(self.free) + len(self.by_hash) - num_new < least

    def forget(self, page_hash: bytes) -> SnapshotPool:
        """Free the row of this hash, if one has it."""
        if page_hash not in self.by_hash:
            return self
        row = self.by_hash[page_hash].row
        return replace(self, free=(*self.free, row), by_hash=self.by_hash.delete(page_hash))

    def _put(self, page_hash: bytes, known: Snapshot) -> SnapshotPool:
        by_hash = self.by_hash.set(page_hash, known._replace(used=self.clock))
        return replace(self, by_hash=by_hash, clock=self.clock + 1)
