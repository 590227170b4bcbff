"""Page pools: take, share and release pages of KV memory; and the pages of a sequence.

Owns: ``PagePool`` (a frozen value) and ``PageWriter`` (its next value while one call builds it).
A page is in exactly one of three states:

- fresh: no owner, its content is undefined;
- live: owned by a sequence, or by several if the page is hashed;
- cached: no owner, but hashed, so that a later request may share it. When no fresh page is left,
  the cached page that was released longest ago is evicted.

Fresh and cached pages are in append-only logs with a head, so popping and pushing cost O(1) and the
old value does not change. A page that is shared again leaves a stale entry in the cached log;
``stamps`` holds the position of the valid entry. Decoding takes pages without writing to either
array, since a copy of an array of the whole pool costs more than the rest of the planning.

A group without a window needs a page for every ``Limits.tokens_per_page`` tokens. A group with a
window needs the pages that the next and later tokens attend to; earlier pages return to the pool
when the step is planned. Steps in flight may still read them, which is safe: a new owner is in a
later step, and the device runs steps in order.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import msgspec
import numpy as np
from immutables import Map

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Pages
from jaxinfer.core.tiers import TierUnit

type GroupPages = tuple[Pages, ...]  # of a sequence, in each group of layers
type IntArray = np.ndarray[Any, np.dtype[np.int32]]

type GroupWriters = Items[PageWriter]  # of each group's pool

NO_STAMP = -1
LEAST_LOOKS = 16  # at entries of the cached log at once, of which some may be stale


class PagePool(msgspec.Struct, frozen=True):
    """The state of every page. Page 0 is for padding and has no owner."""

    fresh: IntLog
    fresh_head: int
    cached: IntLog
    cached_head: int
    num_cached: int
    num_sharers: IntArray  # int32[P]: owners beyond the first
    stamps: IntArray  # int32[P]: position in ``cached``; below ``cached_head`` if not cached
    page_by_hash: Map[bytes, int]
    hash_by_page: Map[int, bytes]
    offered_head: int = 0  # cached pages before it in ``cached`` have been offered to tiers
    num_offered: int = 0  # these pages

    @property
    def num_fresh(self) -> int:
        """Fresh pages."""
        return len(self.fresh) - self.fresh_head

    @property
    def num_free(self) -> int:
        """Pages that ``take`` can return: fresh and cached ones."""
        return self.num_fresh + self.num_cached

    def offers(self, least: int) -> bool:
        """True if there are pages to offer: see ``PageWriter.offer``."""
        return self.num_cached > self.num_offered and self.num_fresh + self.num_offered < least


def new_pool(num_pages: int) -> PagePool:
    """A pool in which all pages but the padding page are fresh."""
    return PagePool(
        fresh=IntLog(np.arange(1, num_pages, dtype=np.int32)),
        fresh_head=0,
        cached=IntLog(),
        cached_head=0,
        num_cached=0,
        num_sharers=_frozen(np.zeros(num_pages, np.int32)),
        stamps=_frozen(np.full(num_pages, NO_STAMP, np.int32)),
        page_by_hash=Map(),
        hash_by_page=Map(),
    )


class IndexChange(msgspec.Struct, frozen=True, gc=False):
    """Pages that were registered with their keys in the prefix index, or evicted from it."""

    units: Items[TierUnit]  # in order
    is_added: bool


class PageWriter:
    """Builds the next ``PagePool``. The arrays are copied once per call, and only if written.

    ``num_live`` are the live pages of each group, which the writers of all pools count.
    """

    def __init__(self, pool: PagePool, num_live: list[int]) -> None:
        self.index_changes: list[IndexChange] = []  # in order
        self._pool = pool
        self._fresh = pool.fresh
        self._fresh_head = pool.fresh_head
        self._cached = pool.cached
        self._cached_head = pool.cached_head
        self._num_cached = pool.num_cached
        self._num_live = num_live
        self._num_sharers = pool.num_sharers
        self._stamps = pool.stamps
        self._page_by_hash = pool.page_by_hash
        self._hash_by_page = pool.hash_by_page
        self._offered_head = pool.offered_head
        self._num_offered = pool.num_offered

    @property
    def num_free(self) -> int:
        """Pages that ``take`` can return."""
        return len(self._fresh) - self._fresh_head + self._num_cached

    @property
    def page_by_hash(self) -> Map[bytes, int]:
        """The registered pages."""
        return self._page_by_hash

    def has(self, page_hash: bytes) -> bool:
        """True if a page is registered with this hash."""
        return page_hash in self._page_by_hash

    def lookup(self, page_hashes: Items[bytes]) -> list[int]:
        """The pages of ``page_hashes``, up to the first one that is not registered."""
        pages: list[int] = []
        for page in map(self._page_by_hash.get, page_hashes):
            if page is None:
                break
            pages.append(page)
        return pages

    def num_cached_among(self, pages: list[int]) -> int:
        """The number of these hashed pages that have no owner: sharing makes them not free."""
        return int(np.count_nonzero(self._stamps[pages] >= self._cached_head)) if pages else 0

    def take(self, count: int, group: int = 0) -> list[int]:
        """Take ``count`` unshared pages for a group; the caller must have checked ``num_free``."""
        self._num_live[group] += count
        head = self._fresh_head
        pages: list[int] = self._fresh.array()[head : head + count].tolist()
        self._fresh_head = head + len(pages)
        return pages + self._evict(count - len(pages)) if len(pages) < count else pages

    def share(self, pages: list[int], group: int = 0) -> None:
        """Add an owner to hashed pages of a group."""
        if not pages:
            return
        hashed = np.array(pages, np.int32)
        stamps = self._stamps[hashed]
        cached = stamps >= self._cached_head
        if num_cached := int(np.count_nonzero(cached)):
            self._num_cached -= num_cached
            self._num_live[group] += num_cached
            self._num_offered -= int(np.count_nonzero(cached & (stamps < self._offered_head)))
            self._writable_stamps()[hashed[cached]] = NO_STAMP
        if num_cached < len(pages):
            self._writable_num_sharers()[hashed[~cached]] += 1

    def release(self, pages: IntArray, group: int = 0) -> None:
        """Remove an owner of a sequence's ``pages`` in a group; they are in token order.

        Hashed pages without an owner become cached, the last one first. So a prefix is evicted
        after its continuation: a page is useful only together with all pages before it.
        """
        shared = self._num_sharers[pages] > 0
        if shared.any():
            self._writable_num_sharers()[pages[shared]] -= 1
            pages = pages[~shared]
        self._num_live[group] -= len(pages)
        free = pages[::-1]
        if self._hash_by_page:  # none has a hash without prefix caching
            known = map(self._hash_by_page.__contains__, free.tolist())
            hashed = np.fromiter(known, np.bool_, len(free))
            free, cached = free[~hashed], free[hashed]
            if len(cached):
                start = len(self._cached)
                self._cached = self._cached.extend(cached)
                self._writable_stamps()[cached] = np.arange(start, start + len(cached))
                self._num_cached += len(cached)
        self._fresh = self._fresh.extend(free)
        self._compact()

    def register(self, pages: Items[int], page_hashes: Items[bytes]) -> None:
        """Set the hashes of live unshared pages; a hash that another page has is skipped."""
        page_by_hash, hash_by_page = self._page_by_hash.mutate(), self._hash_by_page.mutate()
        added: list[TierUnit] = []
        for page, page_hash in zip(pages, page_hashes, strict=True):
            if page_hash not in page_by_hash:
                page_by_hash[page_hash] = page
                hash_by_page[page] = page_hash
                added.append(TierUnit(page_hash, page))
        if added:
            self.index_changes.append(IndexChange(added, True))
        self._page_by_hash, self._hash_by_page = page_by_hash.finish(), hash_by_page.finish()

    def units(self, pages: Items[int]) -> list[TierUnit]:
        """The units of those pages that have a hash: all of their tokens have been computed."""
        known = ((page, self._hash_by_page.get(page)) for page in pages)
        return [TierUnit(key, page) for page, key in known if key is not None]

    def offer(self, least: int, most: int) -> list[TierUnit]:
        """Up to ``most`` cached pages, in the order of eviction, that were not offered before.

        There are none if ``least`` pages are fresh or have been offered: these can be taken, and no
        prefix is lost that a tier does not have.
        """
        count = least - (len(self._fresh) - self._fresh_head) - self._num_offered
        first = max(self._offered_head, self._cached_head)
        pages, self._offered_head = self._next_cached(first, min(count, most))
        self._num_offered += len(pages)
        return self.units(pages)

    def next_unsaved(self, count: int) -> tuple[list[int], list[TierUnit]]:
        """The fresh pages among those that ``take(count)`` returns, and the units that it evicts
        before they were offered.
        """
        fresh: list[int] = self._fresh.array()[self._fresh_head :][:count].tolist()
        first = max(self._offered_head, self._cached_head)
        pages, _ = self._next_cached(first, count - len(fresh) - self._num_offered)
        return fresh, self.units(pages)

    def finish(self) -> PagePool:
        """The next value; the writer must not be used afterwards."""
        return PagePool(
            self._fresh,
            self._fresh_head,
            self._cached,
            self._cached_head,
            self._num_cached,
            _frozen(self._num_sharers),
            _frozen(self._stamps),
            self._page_by_hash,
            self._hash_by_page,
            self._offered_head,
            self._num_offered,
        )

    def _evict(self, count: int) -> list[int]:
        """Remove the ``count`` cached pages that were released longest ago from the index."""
        pages, self._cached_head = self._next_cached(self._cached_head, count)
        self._num_offered -= min(count, self._num_offered)  # these are the first in the log
        self._offered_head = max(self._offered_head, self._cached_head)
        self._num_cached -= count
        page_by_hash, hash_by_page = self._page_by_hash.mutate(), self._hash_by_page.mutate()
        removed = list(map(TierUnit, map(hash_by_page.pop, pages), pages))
        for unit in removed:
            del page_by_hash[unit.key]
        self.index_changes.append(IndexChange(removed, False))
        self._page_by_hash, self._hash_by_page = page_by_hash.finish(), hash_by_page.finish()
        return pages

    def _next_cached(self, position: int, count: int) -> tuple[list[int], int]:
        """The first ``count`` cached pages from a position in the log on, or all that there are,
        and the position after the last of them.
        """
        log, pages = self._cached.array(), list[int]()
        while len(pages) < count and position < len(log):
            looked = log[position:][: max(count, LEAST_LOOKS)]
            for page, stamp in zip(looked.tolist(), self._stamps[looked].tolist(), strict=True):
                if len(pages) == count:
                    break
                if stamp == position:  # else a stale entry: the page was shared again
                    pages.append(page)
                position += 1
        return pages, position

    def _compact(self) -> None:
        """Drop consumed and stale log entries when a log is twice the pool: amortised O(1)."""
        bound = 2 * len(self._stamps)
        if len(self._fresh) > bound:
            self._fresh = IntLog(self._fresh.array()[self._fresh_head :])
            self._fresh_head = 0
        if len(self._cached) > bound:
            log, positions = self._cached.array(), np.arange(len(self._cached))
            alive = log[(positions >= self._cached_head) & (self._stamps[log] == positions)]
            self._offered_head = self._num_offered
            stamps = self._writable_stamps()
            stamps[:] = NO_STAMP
            stamps[alive] = np.arange(len(alive))
            self._cached, self._cached_head = IntLog(alive), 0

    def _writable_num_sharers(self) -> IntArray:
        if self._num_sharers is self._pool.num_sharers:
            self._num_sharers = self._num_sharers.copy()
        return self._num_sharers

    def _writable_stamps(self) -> IntArray:
        if self._stamps is self._pool.stamps:
            self._stamps = self._stamps.copy()
        return self._stamps


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


def new_pools(limits: Limits) -> tuple[PagePool, ...]:
    """The pools of an engine in which no sequence runs."""
    return tuple(map(new_pool, limits.num_pages))


def have(pools: Items[PageWriter], counts: Items[int]) -> bool:
    """True if each pool has as many free pages as its count."""
    return all([count <= pool.num_free for pool, count in zip(pools, counts, strict=True)])


def release_passed(pages: GroupWriters, held: GroupPages, start: int, limits: Limits) -> GroupPages:
    """``held`` without pages before the windows of a token at ``start``, which are released."""
    kept: list[Pages] = []
    for group, own in enumerate(held):
        passed = limits.first_page(start, limits.groups[group]) - own.first
        if passed > 0:
            ids = own.ids.array()
            pages[group].release(ids[:passed], group)
            own = Pages(IntLog(ids[passed:]), own.first + passed)
        kept.append(own)
    return tuple(kept)


def num_missing_pages(held: GroupPages, end: int, limits: Limits) -> list[int]:
    """The pages that the groups lack for tokens before position ``end``, for each pool."""
    pairs = zip(held, limits.groups, strict=True)
    return limits.of_pools(
        [max(0, cdiv(end, limits.tokens_per_page(group)) - own.end) for own, group in pairs]
    )


def extend_pages(pages: GroupWriters, held: GroupPages, end: int, limits: Limits) -> GroupPages:
    """``held`` with new pages for tokens before ``end``; the caller must check ``num_free``."""
    extended: list[Pages] = []
    for number, (own, group) in enumerate(zip(held, limits.groups, strict=True)):
        count = cdiv(end, limits.tokens_per_page(group)) - own.end
        if count > 0:
            own = Pages(own.ids.extend(pages[number].take(count, number)), own.first)
        extended.append(own)
    return tuple(extended)
