"""Reusing prefixes: a chained hash for each full page of tokens, and the longest prefix in pages.

The digest of a page covers the salt, the steering and every token up to the page's end, so equal
digests mean equal KV. The chain is as in vLLM (automatic prefix caching).
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from jaxinfer.core.config import Limits
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.shapes import first_page
from jaxinfer.sched.pages import PageWriter
from jaxinfer.sched.snapshots import SnapshotPool

DIGEST_SIZE = 16  # bytes; 128 bits make a chance collision of contents irrelevant


def following_page_hashes(
    page_hashes: tuple[bytes, ...], root: bytes, token_ids: IntLog, num_pages: int, page_size: int
) -> Generator[bytes]:
    """Yield the digests of the full pages after ``page_hashes``, up to ``num_pages`` in all.

    Each is computed on demand. ``root`` is ``Request.cache_root``.
    """
    known = len(page_hashes)
    parent = page_hashes[-1] if page_hashes else _digest(root)
    tokens = token_ids.array()[known * page_size : num_pages * page_size].tobytes()
    stride = page_size * 4  # int32
    for start in range(0, len(tokens), stride):
        parent = _digest(parent + tokens[start : start + stride])
        yield parent


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()


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
    groups = range(len(limits.groups))
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
    window = limits.groups[group].window
    first = first_page(num_pages * limits.page_size, window, limits.page_size)
    keys = [group_key(page_hash, group) for page_hash in page_hashes[first:num_pages]]
    ids = pages.lookup(keys)
    if len(ids) == len(keys):
        return num_pages, ids
    if window is None:
        return len(ids), []
    missing = next(i for i in reversed(range(len(keys))) if not pages.has(keys[i]))
    return first + missing, []
