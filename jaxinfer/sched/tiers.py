"""Prefixes in tiers: whether a request restores one, and what it loads.

A request whose prefix goes on in a tier may be admitted as if the device had it: it takes a slot
and all its pages, and gets no row before the tier has loaded the missing ones (``Loaded``), which
are written to its pages before the next step. Others are admitted and decode in the meantime. If a
load fails, the request returns to the queue and is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from typing import NamedTuple

from immutables import Map
from msgspec.structs import replace

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request
from jaxinfer.core.tiers import (
    SNAPSHOTS,
    Load,
    Loaded,
    TierUnit,
    group_of,
    key_in,
)
from jaxinfer.sched.pages import PageWriter
from jaxinfer.sched.prefix import PrefixHit, following_page_hashes, group_keys, longest_hit
from jaxinfer.sched.saves import unsaved_bytes
from jaxinfer.sched.sequence import Restoring, Sequence
from jaxinfer.sched.snapshots import SnapshotPool
from jaxinfer.sched.state import Draft

IN_TIER = -1  # in place of a page's id
# At a load, between steps of others: its units are copied, and then they are on the device.
NUM_LOOKS = 2


class TieredPages(NamedTuple):
    """The pages of a pool, and behind them those of tiers."""

    pool: PageWriter
    keys: Map[bytes, None]

    def has(self, page_hash: bytes) -> bool:
        """True if the pool or a tier has a page with this key."""
        return self.pool.has(page_hash) or page_hash in self.keys

    def lookup(self, page_hashes: Items[bytes]) -> list[int]:
        """The pages of these keys, ``IN_TIER`` for those of tiers, up to the first unknown key."""
        found: list[int] = []
        pages = map(self.pool.page_by_hash.get, page_hashes)
        for key, page in zip(page_hashes, pages, strict=True):
            if page is None and key not in self.keys:
                break
            found.append(IN_TIER if page is None else page)
        return found


class TieredSnapshots(NamedTuple):
    """The snapshots, and behind them those of tiers."""

    pool: SnapshotPool
    keys: Map[bytes, None]

    def last_within(self, page_hashes: Items[bytes]) -> int:
        """See ``SnapshotPool``."""
        for length in range(len(page_hashes), self.pool.last_within(page_hashes), -1):
            if key_in(SNAPSHOTS, page_hashes[length - 1]) in self.keys:
                return length
        return self.pool.last_within(page_hashes)


class Continued(NamedTuple):
    """A prefix that goes on in tiers."""

    hit: PrefixHit  # its ids have ``IN_TIER`` for pages that are to be loaded
    known: int  # pages of ``page_size`` tokens that the device has
    state_key: bytes | None = None  # of the snapshot that is to be loaded


def continued_in_tiers(
    draft: Draft, seq: Sequence, page_hashes: Items[bytes], hit: PrefixHit
) -> Continued | None:
    """The longer prefix that tiers have, if it takes less time to restore than to compute, or
    belongs to a sequence that was offloaded.

    ``hit``: the prefix that the device has.
    """
    policy, keys, limits = draft.tiers, draft.moves.keys, draft.limits
    if policy is None or not keys or not seq.may_restore:
        return None
    pages = [TieredPages(pool, keys) for pool in draft.pages]
    far = longest_hit(pages, TieredSnapshots(draft.snapshots, keys), page_hashes, limits)
    if far.num_pages <= hit.num_pages:
        return None
    state_key = None
    if limits.num_snapshots and page_hashes[far.num_pages - 1] not in draft.snapshots.by_hash:
        state_key = key_in(SNAPSHOTS, page_hashes[far.num_pages - 1])
    num_bytes = 0 if state_key is None else policy.state_bytes
    for group, ids in enumerate(far.ids):
        num_bytes += ids.count(IN_TIER) * policy.unit_bytes[group]
    if not (policy.offloads and seq.was_offloaded):
        counts = [ids.count(IN_TIER) for ids in far.ids]
        others = any(not seq.is_prefilling for seq in draft.running.values())
        seconds = policy.cost.restoring(
            num_bytes, unsaved_bytes(draft, policy, counts), NUM_LOOKS if others else 0
        )
        num_tokens = (far.num_pages - hit.num_pages) * limits.page_size
        if not policy.cost.restores(seconds, num_tokens, limits.max_num_batched_tokens):
            return None
    return Continued(far, hit.num_pages, state_key)


def keys_of(request: Request, limits: Limits) -> list[bytes]:
    """The keys of all units of a request's prompt."""
    tokens, size = IntLog(request.prompt_token_ids), limits.page_size
    hashes = tuple(
        following_page_hashes((), request.cache_root, tokens, (len(tokens) - 1) // size, size)
    )
    keys = [
        key for group in range(len(limits.groups)) for key in group_keys(hashes, 0, group, limits)
    ]
    if limits.num_snapshots:
        keys += [key_in(SNAPSHOTS, page_hash) for page_hash in hashes]
    return keys


def restoring_of(
    ticket: int, found: Continued, page_hashes: Items[bytes], ids: Items[Items[int]], draft: Draft
) -> Restoring | None:
    """The load of an admission, which is ordered; None if there is no row for its snapshot.

    ``ids``: for each group the pages that the sequence will own for ``found.hit``.
    """
    limits, end = draft.limits, found.hit.num_pages
    row, units = None, list[TierUnit]()
    if found.state_key is not None:
        if (row := draft.take_snapshot()) is None:
            return None
        units.append(TierUnit(found.state_key, row))
    for group, (known, own) in enumerate(zip(found.hit.ids, ids, strict=True)):
        first = limits.first_page(end * limits.page_size, limits.groups[group])
        keys = group_keys(page_hashes[:end], first, group, limits)
        triples = zip(keys, known, own, strict=True)
        units += [TierUnit(key, page) for key, page_id, page in triples if page_id == IN_TIER]
    draft.moves.loads.append(Load(ticket, tuple(units)))
    size = limits.page_size
    return Restoring(ticket, found.known * size, end * size, tuple(units), row)


def commit_load(draft: Draft, event: Loaded) -> None:
    """Continue the sequence of a finished load; after a failure it is computed."""
    with_ticket = (
        seq
        for seq in draft.running.values()
        if seq.restoring is not None and seq.restoring.ticket == event.ticket
    )
    seq = next(with_ticket, None)
    if seq is None or (own := seq.restoring) is None:
        return  # it was preempted or has ended, and the ticket was dropped
    if event.failed:
        draft.moves.change((), event.failed)
        draft.requeue(replace(seq, may_restore=False))
        return
    reads = seq.reads
    by_group = defaultdict[int, list[TierUnit]](list)
    for unit in own.units:
        by_group[group_of(unit.key)].append(unit)
    for group, units in by_group.items():
        if group != SNAPSHOTS:
            pages = draft.pages[group]
            pages.register([unit.place for unit in units], [unit.key for unit in units])
    if own.row is not None:
        page_hash = seq.page_hashes[own.end // draft.limits.page_size - 1]
        draft.snapshots = draft.snapshots.release((own.row,)).register(own.row, page_hash)
        reads, draft.snapshots = draft.snapshots.use(page_hash)
        draft.restored.add(reads)
    num_cached = seq.num_cached_tokens
    if num_cached is None:
        num_cached = own.end
        draft.num_restored_tokens += own.end - own.known
    draft.running[seq.request_id] = replace(
        seq,
        reads=reads,
        num_registered_pages=own.end // draft.limits.page_size,
        num_cached_tokens=num_cached,
        restoring=None,
    )
