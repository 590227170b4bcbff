"""The events of one call of the scheduler: pages that it registered or evicted.

The records are those of vLLM 0.33 on the wire: a batch is an array of a time, events and a rank, an
event a map of its fields with its ``type``. Hashes are integers of 64 bits, the last bytes of a
page's digest. Only pages of one group of layers without a window are announced: in groups with a
window pages have the same hashes and are evicted earlier, which routers take for the loss of the
prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request
from jaxinfer.core.step import Event, Reset, StepDone
from jaxinfer.core.tiers import Loaded
from jaxinfer.sched.prefix import DIGEST_SIZE, following_page_hashes
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState
from jaxinfer.sched.state import Sequence as SchedSequence

MEDIUM = "GPU"  # the device's memory; routers know vLLM's names of tiers
KIND = "full_attention"  # vLLM's name of a group without a window
HASH_BYTES = 8


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive pages of a prefix can be reused; the first follows ``parent_block_hash``."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # None: they begin the prefix
    token_ids: tuple[int, ...]  # block_size for each
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # for each page what its hash covers besides tokens: the salt, on the first page of a prefix
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Pages can no longer be reused."""

    block_hashes: tuple[int, ...]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No page can be reused."""


type BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one call."""

    ts: float  # seconds since the epoch
    events: tuple[BlockEvent, ...]
    data_parallel_rank: int | None


def announced_group(limits: Limits) -> int | None:
    """The group whose pages are announced: the first without a window, of an entry a token."""
    groups = enumerate(limits.groups)
    plain = (i for i, one in groups if one.window is None and one.tokens_per_entry == 1)
    return next(plain, None) if limits.enable_prefix_caching else None


def has_events(events: Iterable[Event], output: ScheduleOutput) -> bool:
    """True if a call may have changed what can be reused."""
    return any(output.index_changes) or any(isinstance(event, Reset) for event in events)


def block_events(
    group: int,
    before: SchedulerState,
    events: Sequence[Event],
    output: ScheduleOutput,
    after: SchedulerState,
) -> Iterator[BlockEvent]:
    """The events of a call, in the order of time."""
    limits = after.limits
    if any(isinstance(event, Reset) for event in events):
        yield AllBlocksCleared()
    stored = _Stored(limits, group, _chains(before, events, after, limits))
    removed: list[int] = []
    for change in output.index_changes[limits.groups[group].pool]:
        found = (_digest(unit.key, group) for unit in change.units)
        digests = [digest for digest in found if digest is not None]
        if digests and not change.is_added:
            yield from stored.end()
            removed += map(as_integer, digests)
        elif digests:
            if removed:
                yield BlockRemoved(tuple(removed), MEDIUM, group)
                removed.clear()
            for digest in digests:
                yield from stored.add(digest)
    yield from stored.end()
    if removed:
        yield BlockRemoved(tuple(removed), MEDIUM, group)


def as_integer(digest: bytes) -> int:
    """The hash of a page on the wire."""
    return int.from_bytes(digest[-HASH_BYTES:], "big")


def _digest(key: bytes, group: int) -> bytes | None:
    """A page's digest, if its key is one of the group: see ``prefix.group_keys``."""
    digest, suffix = key[:DIGEST_SIZE], key[DIGEST_SIZE:]
    return digest if suffix == (bytes((group,)) if group else b"") else None


class _Chain(msgspec.Struct, frozen=True):
    """The pages of a sequence after a call."""

    request: Request
    hashes: tuple[bytes, ...]
    token_ids: IntLog


class _Stored:
    """Gathers pages that follow each other into one ``BlockStored``."""

    def __init__(self, limits: Limits, group: int, chains: Iterable[_Chain]) -> None:
        self._size, self._group = limits.page_size, group
        self._places = {
            digest: (chain, number)
            for chain in chains
            for number, digest in enumerate(chain.hashes)
        }
        self._open: BlockStored | None = None

    def add(self, digest: bytes) -> Iterator[BlockStored]:
        """Add a page; yields the pages before it if it does not follow them."""
        chain, number = self._places[digest]
        parent = as_integer(chain.hashes[number - 1]) if number else None
        tokens = tuple(chain.token_ids[number * self._size : (number + 1) * self._size])
        extra = None if number else _extra_keys(chain.request)
        if self._open is not None and parent == self._open.block_hashes[-1]:
            keys = self._open.extra_keys
            self._open = replace(
                self._open,
                block_hashes=(*self._open.block_hashes, as_integer(digest)),
                token_ids=self._open.token_ids + tokens,
                extra_keys=None if keys is None else (*keys, None),
            )
            return
        yield from self.end()
        self._open = BlockStored(
            block_hashes=(as_integer(digest),),
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=self._size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=None if extra is None else (extra,),
            group_idx=self._group,
            kv_cache_spec_kind=KIND,
        )

    def end(self) -> Iterator[BlockStored]:
        """The pages gathered so far."""
        if self._open is not None:
            yield self._open
        self._open = None


def _extra_keys(request: Request) -> tuple[str, ...] | None:
    keys = [request.cache_salt] if request.cache_salt else []
    if request.steering is not None:
        keys.append(request.steering.digest.hex())
    return tuple(keys) or None


def _chains(
    before: SchedulerState, events: Sequence[Event], after: SchedulerState, limits: Limits
) -> Iterator[_Chain]:
    """The sequences with a finished row, as they are after it, also those that have ended; before
    them those whose prefix a tier has brought.
    """
    tickets = {event.ticket for event in events if isinstance(event, Loaded)}
    for seq in before.running if tickets else ():
        if seq.restoring is not None and seq.restoring.ticket in tickets:
            yield _Chain(seq.request, seq.page_hashes, seq.token_ids)
    running = {seq.request_id: seq for seq in after.running}
    earlier = {seq.request_id: seq for seq in before.running}
    drawn: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, StepDone):
            for row in event.result.rows:
                seq = earlier.get(row.request_id)
                if seq is not None and seq.epoch == row.epoch:
                    drawn.setdefault(row.request_id, []).extend(row.token_ids)
    for request_id, token_ids in drawn.items():
        now, was = running.get(request_id), earlier[request_id]
        if now is not None and now.epoch == was.epoch:
            yield _Chain(now.request, now.page_hashes, now.token_ids)
        else:
            yield _ended(was, token_ids, limits)


def _ended(seq: SchedSequence, drawn: Sequence[int], limits: Limits) -> _Chain:
    token_ids, size = seq.token_ids.extend(drawn), limits.page_size
    root, count = seq.request.cache_root, len(token_ids) // size
    added: Any = following_page_hashes(seq.page_hashes, root, token_ids, count, size)
    return _Chain(seq.request, (*seq.page_hashes, *added), token_ids)
