"""Reusing prefixes: a chained hash for each full page of tokens, and the longest prefix in pages.

The digest of a page covers the salt, the steering and every token up to the page's end, so equal
digests mean equal KV. The chain is as in vLLM (automatic prefix caching). Digests are of pages of
``page_size`` tokens. A page of entries that stand for several tokens covers several of these, and
is registered with the digest of the last one; a prefix ends where a page of every group does.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple, Protocol

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.tiers import DIGEST_SIZE, key_in


class PageIndex(Protocol):
    """The pages of a group by key: a ``PageWriter``, or one with tiers behind it."""

    def has(self, page_hash: bytes, /) -> bool:
        """True if a page has this key."""
        ...

    def lookup(self, page_hashes: Items[bytes], /) -> list[int]:
        """The pages with these keys, up to the first key that no page has."""
        ...


class SnapshotIndex(Protocol):
    """Saved states by page hash: a ``SnapshotPool``, or one with tiers behind it."""

    def last_within(self, page_hashes: Items[bytes], /) -> int:
        """The length, in pages, of the longest prefix of these pages with a state, or 0."""
        ...


def following_page_hashes(
    page_hashes: tuple[bytes, ...], root: bytes, token_ids: IntLog, num_pages: int, page_size: int
) -> Generator[bytes]:
    """Yield the digests of the full pages after ``page_hashes``, up to ``num_pages`` in all.

    Each is computed on demand. ``root`` is ``Request.cache_root``.
    """
    known = len(page_hashes)
    parent = page_hashes[-1] if page_hashes else blake2b(root, digest_size=DIGEST_SIZE).digest()
    tokens = token_ids.array()[known * page_size : num_pages * page_size].tobytes()
    stride = page_size * 4  # int32
    for start in range(0, len(tokens), stride):
        page = tokens[start : start + stride]
        parent = blake2b(parent + page, digest_size=DIGEST_SIZE).digest()  # 1,024 pages: 0.5 ms
        yield parent


def group_keys(page_hashes: Items[bytes], first: int, group: int, limits: Limits) -> list[bytes]:
    """The keys, in the prefix index, of a group's pages from number ``first`` on that end within
    ``page_hashes``. Groups differ, as they hold KV of other layers.
    """
    each = limits.groups[group].tokens_per_entry
    suffix = key_in(group, b"")
    return [page_hash + suffix for page_hash in page_hashes[(first + 1) * each - 1 :: each]]


class PrefixHit(NamedTuple):
    """A prefix that can be reused."""

    num_pages: int  # of ``page_size`` tokens
    ids: list[list[int]]  # for each group, the pages that the next token attends to, in order
    num_known: int  # pages that could be reused if there were a snapshot; at least ``num_pages``


def longest_hit(
    pages: Items[PageIndex], snapshots: SnapshotIndex, page_hashes: Items[bytes], limits: Limits
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
    pages: Items[PageIndex], page_hashes: Items[bytes], limits: Limits
) -> tuple[int, list[list[int]]]:
    step, groups = limits.reuse_step, range(len(limits.groups))
    num_pages = len(page_hashes) // step * step
    while num_pages:
        found = [_known(pages, page_hashes[:num_pages], group, limits) for group in groups]
        shortest = min(length for length, _ in found) // step * step
        if shortest == num_pages:
            return num_pages, [ids for _, ids in found]
        num_pages = shortest
    return 0, [[] for _ in groups]


def _known(
    pages: Items[PageIndex], page_hashes: Items[bytes], group: int, limits: Limits
) -> tuple[int, list[int]]:
    """The number of ``page_hashes``, and the page ids that a group needs to continue after them.

    If one of them is not in the index: a smaller number of pages that may be possible, and [].
    """
    own, num_pages = limits.groups[group], len(page_hashes)
    first = limits.first_page(num_pages * limits.page_size, own)
    keys = group_keys(page_hashes, first, group, limits)
    ids = pages[group].lookup(keys)
    if len(ids) == len(keys):
        return num_pages, ids
    missing = len(ids)
    if own.window is not None:
        missing = next(i for i in reversed(range(len(keys))) if not pages[group].has(keys[i]))
    return (first + missing) * own.tokens_per_entry, []
