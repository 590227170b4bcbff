"""The pages of a sequence in each group of layers, and the longest prefix that can be reused.

A group without a window needs a page for every ``page_size`` tokens. A group with a window needs
the pages that the next and later tokens attend to; earlier pages return to the pool when the step
is planned. Steps in flight may still read them, which is safe: a new owner is in a later step, and
the device runs steps in order.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from jaxinfer.core.config import Limits
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.shapes import cdiv, first_page
from jaxinfer.core.step import Pages
from jaxinfer.sched.pages import PageWriter
from jaxinfer.sched.snapshots import SnapshotPool

type GroupPages = tuple[Pages, ...]


def release_passed(pages: PageWriter, held: GroupPages, start: int, limits: Limits) -> GroupPages:
    """``held`` without pages before the windows of a token at ``start``, which are released."""
    kept: list[Pages] = []
    for group, (own, window) in enumerate(zip(held, limits.windows, strict=True)):
        passed = first_page(start, window, limits.page_size) - own.first
        if passed > 0:
            ids = own.ids.array()
            pages.release(ids[:passed], group)
            own = Pages(IntLog(ids[passed:]), own.first + passed)
        kept.append(own)
    return tuple(kept)


def num_missing_pages(held: GroupPages, end: int, limits: Limits) -> int:
    """The number of pages that the groups lack for tokens before position ``end``."""
    needed = cdiv(end, limits.page_size)
    return sum([max(0, needed - group.end) for group in held])


def extend_pages(pages: PageWriter, held: GroupPages, end: int, limits: Limits) -> GroupPages:
    """``held`` with new pages for tokens before ``end``; the caller must check ``num_free``."""
    needed = cdiv(end, limits.page_size)
    return tuple(
        [
            own
            if own.end >= needed
            else Pages(own.ids.extend(pages.take(needed - own.end, group)), own.first)
            for group, own in enumerate(held)
        ]
    )


def group_key(page_hash: bytes, group: int) -> bytes:
    """The key of a page in the prefix index. Groups differ, as they hold KV of other layers."""
    return page_hash + bytes((group,)) if group else page_hash


class PrefixHit(NamedTuple):
    """A prefix that can be reused."""

    num_pages: int
    ids: list[list[int]]  # for each group, the pages that the next token attends to, in order
    num_known: int  # pages that could be reused if there were a snapshot; at least ``num_pages``


def longest_hit(
    pages: PageWriter, snapshots: SnapshotPool, page_hashes: Items[bytes], limits: Limits
) -> PrefixHit:
    """The longest prefix that every group can reuse.

    For a model with state for each sequence it also ends at a snapshot.
    """
    num_known, ids = _longest_in_pages(pages, page_hashes, limits)
    num_pages = num_known
    while limits.num_snapshots and num_pages:
        at_snapshot = snapshots.last_within(page_hashes[:num_pages])
        if at_snapshot == num_pages:
            break
        num_pages, ids = _longest_in_pages(pages, page_hashes[:at_snapshot], limits)
    return PrefixHit(num_pages, ids, num_known)


def _longest_in_pages(
    pages: PageWriter, page_hashes: Items[bytes], limits: Limits
) -> tuple[int, list[list[int]]]:
    num_pages = len(page_hashes)
    groups = range(len(limits.windows))
    while num_pages:
        found = [_known(pages, page_hashes, group, num_pages, limits) for group in groups]
        shortest = min(length for length, _ in found)
        if shortest == num_pages:
            return num_pages, [ids for _, ids in found]
        num_pages = shortest
    return 0, [[] for _ in groups]


def _known(
    pages: PageWriter, page_hashes: Items[bytes], group: int, num_pages: int, limits: Limits
) -> tuple[int, list[int]]:
    """``num_pages`` and the page ids that a group needs to continue after that many pages.

    If one of them is not in the index: a smaller number of pages that may be possible, and [].
    """
    window = limits.windows[group]
    first = first_page(num_pages * limits.page_size, window, limits.page_size)
    keys = [group_key(page_hash, group) for page_hash in page_hashes[first:num_pages]]
    ids = pages.lookup(keys)
    if len(ids) == len(keys):
        return num_pages, ids
    if window is None:
        return len(ids), []
    missing = next(i for i in reversed(range(len(keys))) if not pages.has(keys[i]))
    return first + missing, []
