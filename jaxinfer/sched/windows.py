"""The pages of a sequence in each group of layers: which it needs, and which it may give back.

A group that looks at everything needs a page for every ``page_size`` tokens. A group with a window
needs those that the next token and later ones look at; the pages before go back to the pool when
the step is planned. Steps in flight may still read them: a new owner is in a later step, and the
device runs steps in order.

Owns: moving a sequence's pages on, and the longest prefix that every group can serve.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from jaxinfer.core.config import Limits
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.shapes import cdiv, first_page
from jaxinfer.core.step import Pages
from jaxinfer.sched.pages import PageWriter
from jaxinfer.sched.snapshots import SnapshotWriter

type GroupPages = tuple[Pages, ...]


def without_passed(pages: PageWriter, held: GroupPages, start: int, limits: Limits) -> GroupPages:
    """``held`` without what is behind the windows of a token at ``start``; it goes back."""
    kept: list[Pages] = []
    for group, window in zip(held, limits.windows, strict=True):
        passed = first_page(start, window, limits.page_size) - group.first
        if passed > 0:
            ids = group.ids.array()
            pages.release(ids[:passed], len(kept))  # the group's number
            group = Pages(IntLog(ids[passed:]), group.first + passed)
        kept.append(group)
    return tuple(kept)


def num_missing(held: GroupPages, end: int, limits: Limits) -> int:
    """Pages that the groups lack for tokens before position ``end``."""
    needed = cdiv(end, limits.page_size)
    return sum([max(0, needed - group.end) for group in held])


def extended(pages: PageWriter, held: GroupPages, end: int, limits: Limits) -> GroupPages:
    """``held`` with pages for tokens before ``end``; the caller has checked that there are any."""
    needed = cdiv(end, limits.page_size)
    return tuple(
        [
            own
            if own.end >= needed
            else Pages(own.ids.extend(pages.take(needed - own.end, group)), own.first)
            for group, own in enumerate(held)
        ]
    )


def name_in_group(page_hash: bytes, group: int) -> bytes:
    """The name of a page's content in one group: layers of another keep something else there."""
    return page_hash + bytes((group,)) if group else page_hash


class Hit(NamedTuple):
    """A prefix that can be reused, in pages."""

    num_pages: int
    ids: list[list[int]]  # of each group: the pages that a next token looks at, in order
    num_known: int  # pages that every group of layers could go on behind, were there a snapshot


def longest_hit(
    pages: PageWriter, snapshots: SnapshotWriter, page_hashes: Items[bytes], limits: Limits
) -> Hit:
    """The longest prefix behind which every group can go on, and of models with state for each
    sequence one that ends at a snapshot.
    """
    num_known, ids = _longest_in_pages(pages, page_hashes, limits)
    num_pages = num_known
    while limits.num_snapshots and num_pages:
        at_snapshot = snapshots.last_within(page_hashes[:num_pages])
        if at_snapshot == num_pages:
            break
        num_pages, ids = _longest_in_pages(pages, page_hashes[:at_snapshot], limits)
    return Hit(num_pages, ids, num_known)


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
    """Whether a group can go on behind so many pages: if so their number and what it needs of them,
    else a smaller number, which it may be able to go on behind.
    """
    window = limits.windows[group]
    first = first_page(num_pages * limits.page_size, window, limits.page_size)
    wanted = [name_in_group(page_hash, group) for page_hash in page_hashes[first:num_pages]]
    ids = pages.lookup(wanted)
    if len(ids) == len(wanted):
        return num_pages, ids
    if window is None:
        return len(ids), []
    missing = next(i for i in reversed(range(len(wanted))) if not pages.knows(wanted[i]))
    return first + missing, []
