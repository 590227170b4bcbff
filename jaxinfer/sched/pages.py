"""The page pool: who may take, share and return the pages of KV memory.

Owns: ``PagePool`` (a frozen value) and ``PageWriter`` (its next value while one call builds it).
A page is in exactly one place:

- fresh: no owner, its content means nothing;
- live: owned by ``ref_counts`` sequences; more than one only if the page is hashed;
- cached: no owner, but hashed, so that a later request may share it; evicted least recently
  released first, when no fresh page is left.

Both free places are append-only logs with a head, so popping and pushing cost O(1) and the old
value stays as it was. A page that is shared again leaves a stale entry in the cached log;
``stamps`` tells which entry counts. Must not know: sequences, tokens, steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import msgspec
import numpy as np
from immutables import Map

from jaxinfer.core.intlog import IntLog

type IntArray = np.ndarray[Any, np.dtype[np.int32]]

NOT_HASHED = -2  # stamp of a page without a hash
LIVE = -1  # stamp of a hashed page that has an owner


class PagePool(msgspec.Struct, frozen=True):
    """Where every page is. Page 0 is the padding sink and belongs to nobody."""

    fresh: IntLog
    fresh_head: int
    cached: IntLog
    cached_head: int
    num_cached: int
    ref_counts: IntArray  # int32[P]
    stamps: IntArray  # int32[P]: position in ``cached``, or LIVE, or NOT_HASHED
    page_by_hash: Map[bytes, int]
    hash_by_page: Map[int, bytes]

    @property
    def num_free(self) -> int:
        """Pages that ``take`` can hand out: fresh and cached ones."""
        return len(self.fresh) - self.fresh_head + self.num_cached


def new_pool(num_pages: int) -> PagePool:
    """All pages fresh, but the padding sink."""
    return PagePool(
        fresh=IntLog(range(1, num_pages)),
        fresh_head=0,
        cached=IntLog(),
        cached_head=0,
        num_cached=0,
        ref_counts=_frozen(np.zeros(num_pages, np.int32)),
        stamps=_frozen(np.full(num_pages, NOT_HASHED, np.int32)),
        page_by_hash=Map(),
        hash_by_page=Map(),
    )


class PageWriter:
    """Builds the next ``PagePool``. The arrays are copied once per call, and only if written."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._fresh = pool.fresh
        self._fresh_head = pool.fresh_head
        self._cached = pool.cached
        self._cached_head = pool.cached_head
        self._num_cached = pool.num_cached
        self._ref_counts = pool.ref_counts
        self._stamps = pool.stamps
        self._page_by_hash = pool.page_by_hash
        self._hash_by_page = pool.hash_by_page
        self._changed = False

    @property
    def num_free(self) -> int:
        """Pages that ``take`` can hand out."""
        return len(self._fresh) - self._fresh_head + self._num_cached

    def lookup(self, page_hashes: Items[bytes]) -> list[int]:
        """The pages of the longest known chain that ``page_hashes`` begins with."""
        pages: list[int] = []
        for page_hash in page_hashes:
            page = self._page_by_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_cached_among(self, pages: list[int]) -> int:
        """How many of these hashed pages have no owner, and so would stop being free if shared."""
        return int(np.count_nonzero(self._stamps[pages] >= 0)) if pages else 0

    def take(self, count: int) -> list[int]:
        """``count`` private pages; the caller has checked ``num_free``."""
        head = self._fresh_head
        pages: list[int] = self._fresh.array()[head : head + count].tolist()
        self._fresh_head = head + len(pages)
        if len(pages) < count:
            pages += self._evict(count - len(pages))
        self._writable_ref_counts()[pages] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Add an owner to hashed pages."""
        if not pages:
            return
        self._num_cached -= self.num_cached_among(pages)
        self._writable_stamps()[pages] = LIVE
        self._writable_ref_counts()[pages] += 1

    def release(self, pages: IntArray) -> None:
        """Remove an owner of a sequence's ``pages``, in token order.

        Hashed pages without an owner become cached, the deepest first: a prefix outlives what
        follows it, since a page is of use only together with all pages before it.
        """
        if not len(pages):
            return
        ref_counts = self._writable_ref_counts()
        ref_counts[pages] -= 1
        free = pages[ref_counts[pages] == 0][::-1]
        hashed = self._stamps[free] != NOT_HASHED
        self._fresh = self._fresh.extend(free[~hashed])
        if len(cached := free[hashed]):
            start = len(self._cached)
            self._cached = self._cached.extend(cached)
            self._writable_stamps()[cached] = np.arange(start, start + len(cached))
            self._num_cached += len(cached)
        self._compact()

    def register(self, pages: Items[int], page_hashes: Items[bytes]) -> None:
        """Name live private pages by their content; a name that is taken stays where it is."""
        for page, page_hash in zip(pages, page_hashes, strict=True):
            if page_hash not in self._page_by_hash:
                self._page_by_hash = self._page_by_hash.set(page_hash, page)
                self._hash_by_page = self._hash_by_page.set(page, page_hash)
                self._writable_stamps()[page] = LIVE

    def finish(self) -> PagePool:
        """The next value; the writer must not be used afterwards."""
        if not self._changed:
            return self._pool
        return PagePool(
            self._fresh,
            self._fresh_head,
            self._cached,
            self._cached_head,
            self._num_cached,
            _frozen(self._ref_counts),
            _frozen(self._stamps),
            self._page_by_hash,
            self._hash_by_page,
        )

    def _evict(self, count: int) -> list[int]:
        """Forget the ``count`` cached pages that were released longest ago."""
        stamps = self._writable_stamps()
        page_by_hash, hash_by_page = self._page_by_hash.mutate(), self._hash_by_page.mutate()
        log, position = self._cached.array(), self._cached_head
        pages: list[int] = []
        while len(pages) < count:
            page = int(log[position])
            if stamps[page] == position:  # else shared since: a stale entry
                stamps[page] = NOT_HASHED
                del page_by_hash[hash_by_page.pop(page)]
                pages.append(page)
            position += 1
        self._cached_head = position
        self._num_cached -= count
        self._page_by_hash, self._hash_by_page = page_by_hash.finish(), hash_by_page.finish()
        return pages

    def _compact(self) -> None:
        """Drop consumed and stale log entries once they outnumber the pages: amortised O(1)."""
        bound = 2 * len(self._ref_counts)
        if len(self._fresh) > bound:
            self._fresh = IntLog(self._fresh.array()[self._fresh_head :])
            self._fresh_head = 0
        if len(self._cached) > bound:
            log = self._cached.array()
            stamps = self._writable_stamps()
            alive = log[stamps[log] == np.arange(len(log))]
            stamps[alive] = np.arange(len(alive))
            self._cached, self._cached_head = IntLog(alive), 0

    def _writable_ref_counts(self) -> IntArray:
        self._changed = True
        if self._ref_counts is self._pool.ref_counts:
            self._ref_counts = self._ref_counts.copy()
        return self._ref_counts

    def _writable_stamps(self) -> IntArray:
        self._changed = True
        if self._stamps is self._pool.stamps:
            self._stamps = self._stamps.copy()
        return self._stamps


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array
