"""The scheduler's state: ``SchedulerState``, and ``Draft``, the builder of the next one.

Owns: the moves of a sequence between waiting, running and ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import product
from operator import attrgetter

import msgspec
from immutables import Map

from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import Bucket, StepPlan, TokenEvent, choices
from jaxinfer.core.tiers import NO_ORDERS, SNAPSHOTS, Load, TierOrders, TierPolicy, TierUnit, key_in
from jaxinfer.sched.moves import Evicted, Moves
from jaxinfer.sched.pages import IndexChange, PagePool, PageWriter, new_pools
from jaxinfer.sched.sequence import NO_SLOT, Order, Sequence
from jaxinfer.sched.snapshots import SnapshotPool, new_snapshots

_order_of = attrgetter("order")


class SchedulerState(msgspec.Struct, frozen=True):
    """The immutable state: ``schedule`` returns the next one."""

    limits: Limits
    buckets: tuple[Bucket, ...]  # whose executables are loaded, smallest first
    running: tuple[Sequence, ...]  # sorted by order
    waiting: tuple[Sequence, ...]  # sorted by order
    orders: Map[str, Order]  # the order of every unfinished request
    free_slots: tuple[int, ...]
    pools: tuple[PagePool, ...]
    num_live_pages: tuple[int, ...]  # of each group
    snapshots: SnapshotPool
    in_flight: tuple[StepPlan, ...] = ()  # launched, not yet StepDone; oldest first
    next_step_id: int = 0
    next_epoch: int = 0
    num_preemptions: int = 0  # since the start
    num_slots: int = 0  # that sequences may have: as many as the buckets hold
    tiers: TierPolicy | None = None  # None: there are none
    tier_keys: Map[bytes, None] = Map()  # of units that can be loaded
    num_restored_tokens: int = 0  # since the start, at the first admission of each request
    evicted: tuple[Evicted, ...] = ()  # see ``Moves``
    held_loads: tuple[Load, ...] = ()
    saving: tuple[tuple[bytes, ...], ...] = ()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.running) + len(self.waiting)

    @property
    def num_free_pages(self) -> int:
        """Pages of all pools that no sequence owns."""
        return sum([pool.num_free for pool in self.pools])


class ScheduleOutput(msgspec.Struct, frozen=True):
    """The step and events of one call.

    ``duplicates`` are ids of arrivals that were dropped because a request with that id is
    unfinished. They have no ``TokenEvent``, as it would end the first request's stream.
    ``index_changes`` are those of each pool's prefix index since ``Reset``, if that was an event.
    """

    step: StepPlan | None
    events: tuple[TokenEvent, ...]
    duplicates: tuple[str, ...] = ()
    index_changes: tuple[Items[IndexChange], ...] = ()
    orders: TierOrders = NO_ORDERS


def initial_state(
    limits: Limits, loaded: Iterable[Bucket] | None = None, tiers: TierPolicy | None = None
) -> SchedulerState:
    """The state before any event; raises ``ConfigError`` if the buckets cannot serve the limits.

    ``loaded``: the buckets that can be used at first; None: those of the limits, which must hold
    ``max_num_seqs`` rows (``missing_size``). With fewer rows there are fewer slots, until larger
    buckets are loaded.
    """
    buckets = tuple(limits.buckets if loaded is None else loaded)
    slots = limits.max_num_seqs if loaded is None else num_slots(buckets, limits)
    if missing := missing_size(buckets, limits, max(slots, 1)):
        raise ConfigError(
            f"no bucket holds {missing}, which max_num_seqs {limits.max_num_seqs} allows; add one "
            "to the bucket table"
        )
    return SchedulerState(
        limits=limits,
        buckets=smallest_first(buckets),
        running=(),
        waiting=(),
        orders=Map(),
        num_slots=slots,
        free_slots=tuple(reversed(range(slots))),
        pools=new_pools(limits),
        num_live_pages=(0,) * len(limits.groups),
        snapshots=new_snapshots(limits.num_snapshots),
        tiers=tiers,
    )


def missing_size(buckets: Iterable[Bucket], limits: Limits, slots: int) -> str:
    """A step of ``slots`` sequences that no bucket holds, in words; empty if each has a bucket.

    One must hold a decode row of every slot, and one the smallest chunk (``Limits.align``) of a
    scored prompt next to decode rows of all other slots; and with each choice of variants that
    requests may need. An engine that pools needs one that holds a prompt. Every other step shrinks
    to a bucket (``choose``).
    """
    sizes, kinds = ((slots, 0), (slots - 1, 1)), choices(limits.variants)
    if limits.pooling:
        sizes = ((0, 1),)
    for (decodes, prefills), variants in product(sizes, kinds):
        scores = bool(prefills) and not limits.pooling
        query_tokens = limits.query_tokens if decodes else 1
        num_tokens = prefills * limits.align
        size = Bucket(decodes, num_tokens, prefills, scores, query_tokens, variants)
        fits = num_tokens <= limits.max_num_batched_tokens
        if not fits or not any(bucket.holds(size) for bucket in buckets):
            what = f" of {num_tokens} tokens" if num_tokens > 1 else ""
            what += " with prompt logprobs" if scores else ""
            what += "".join(f" with {name}" for name in variants)
            return f"{decodes} decodes and {prefills} prefills{what}"
    return ""


def num_slots(buckets: Iterable[Bucket], limits: Limits) -> int:
    """The most sequences whose steps the buckets hold, at most ``max_num_seqs``; 0 if none."""
    buckets, most = tuple(buckets), limits.max_num_seqs
    counts = {most, *(b.num_decodes for b in buckets if 0 < b.num_decodes < most)}
    return max((n for n in counts if not missing_size(buckets, limits, n)), default=0)


def smallest_first(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets in the order in which ``choose`` tries them."""
    return tuple(sorted(set(buckets), key=lambda b: (b.num_tokens, b.num_seqs, b)))


class Draft:
    """The next state while one call builds it; only used within ``schedule``."""

    def __init__(self, state: SchedulerState) -> None:
        self.limits = state.limits
        self.buckets = state.buckets
        self.running = {seq.request.request_id: seq for seq in state.running}  # sorted by order
        self._waiting = state.waiting
        self._enqueued: list[Sequence] = []  # not yet sorted into ``_waiting``
        self.orders = state.orders.mutate()
        self.free_slots = list(state.free_slots)
        self.num_live_pages = list(state.num_live_pages)
        self.tiers = state.tiers
        self.moves = Moves(state.tier_keys, state.evicted, state.held_loads, state.saving)
        self.num_restored_tokens = state.num_restored_tokens
        self._open_pools(state.pools)
        self.has_windows = any([group.window is not None for group in self.limits.groups])
        self.snapshots = state.snapshots
        # snapshots that rows of the step start from, or those of later steps
        self.restored: set[int] = set()
        if self.tiers is not None and self.limits.num_snapshots:
            self.restored.update(s.reads for s in state.running if s.reads is not None)
        self.in_flight = state.in_flight
        self.next_step_id = state.next_step_id
        self.next_epoch = state.next_epoch
        self.num_preemptions = state.num_preemptions
        self.num_slots = state.num_slots
        self.events: list[TokenEvent] = []
        self.duplicates: list[str] = []

    def finish(self) -> SchedulerState:
        """The next state; the draft must not be used afterwards."""
        return SchedulerState(
            self.limits,
            self.buckets,
            tuple(self.running.values()),
            self.waiting,
            self.orders.finish(),
            tuple(self.free_slots),
            tuple([pool.finish() for pool in self.pools]),
            tuple(self.num_live_pages),
            self.snapshots,
            self.in_flight,
            self.next_step_id,
            self.next_epoch,
            self.num_preemptions,
            self.num_slots,
            self.tiers,
            self.moves.keys,
            self.num_restored_tokens,
            self.moves.evicted,
            self.moves.held,
            self.moves.saving,
        )

    def add_buckets(self, loaded: Iterable[Bucket]) -> None:
        """Use these buckets too, and the slots that steps now have rows for."""
        self.buckets = smallest_first((*self.buckets, *loaded))
        slots = num_slots(self.buckets, self.limits)
        self.free_slots[:0] = reversed(range(self.num_slots, slots))  # the last is used first
        self.num_slots = slots

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The sorted waiting queue; sequences that were enqueued are sorted in on access."""
        if self._enqueued:
            self._waiting = tuple(sorted((*self._waiting, *self._enqueued), key=_order_of))
            self._enqueued.clear()
        return self._waiting

    @waiting.setter
    def waiting(self, waiting: tuple[Sequence, ...]) -> None:
        assert not self._enqueued, "read ``waiting`` before it is set"
        self._waiting = waiting

    def enqueue(self, seq: Sequence) -> None:
        """Put ``seq`` into the waiting queue, which is sorted by order."""
        self._enqueued.append(seq)

    def start(self, seqs: list[Sequence]) -> None:
        """Move the first waiting sequences to running, as ``seqs``, which have slots and pages."""
        self.waiting = self.waiting[len(seqs) :]
        running = sorted((*self.running.values(), *seqs), key=_order_of)
        self.running = {seq.request_id: seq for seq in running}

    def preempt_last(self) -> None:
        """Move the last running sequence in order back to waiting; it keeps its known tokens.

        Tokens in flight are dropped when they arrive, as its epoch has ended, and are drawn again:
        the token at a position is a function of (seed, position).
        """
        self.num_preemptions += 1
        seq = next(reversed(self.running.values()))
        if self.tiers is not None and self.tiers.offloads:
            seq = self._offload(seq)
        self.requeue(seq)

    def _offload(self, seq: Sequence) -> Sequence:
        """Save the full pages that ``seq`` owns, and the last state that was saved of it."""
        for pages, own in zip(self.pages, seq.pages, strict=True):
            self.moves.offload(pages.units(own.ids.array().tolist()))
        if count := self.snapshots.last_within(seq.page_hashes[: seq.num_registered_pages]):
            page_hash = seq.page_hashes[count - 1]
            unit = TierUnit(key_in(SNAPSHOTS, page_hash), self.snapshots.by_hash[page_hash].row)
            self.moves.offload((unit,))
        return msgspec.structs.replace(seq, was_offloaded=True)

    def requeue(self, seq: Sequence) -> None:
        """Move a running sequence back to waiting: see ``preempt_last``."""
        self._free_resources(seq)
        self.enqueue(
            msgspec.structs.replace(
                seq,
                slot=NO_SLOT,
                pages=(),
                num_prefill_tokens=0,
                num_computed_tokens=0,
                num_in_flight_tokens=0,
                num_registered_pages=0,
                borders=(),
                saving=None,
                restoring=None,
                is_new=False,
                reads=None,
            )
        )

    def reset(self, *, keeps_tiers: bool) -> None:
        """Preempt every running sequence, and forget all pages and snapshots, and those of tiers
        unless it ``keeps_tiers``.

        Raises ``EngineError`` if a step is in flight: its tokens would be lost.
        """
        if self.in_flight:
            raise EngineError("the scheduler is reset while a step is in flight; collect it first")
        while self.running:
            self.preempt_last()
        self.moves.reset(keeps_keys=keeps_tiers)
        self._open_pools(new_pools(self.limits))
        self.snapshots = new_snapshots(self.limits.num_snapshots)

    def end(
        self,
        request_id: str,
        reason: FinishReason,
        error: str = "",
        *,
        is_request_error: bool = False,
    ) -> None:
        """End an unfinished request with one event, and free its slot and pages."""
        seq = self.running.get(request_id) or self._pop_waiting(request_id)
        self.remove(seq)
        self.events.append(
            TokenEvent(
                request_id,
                num_cached_tokens=seq.num_cached_tokens or 0,
                finish_reason=reason,
                error=error,
                is_request_error=is_request_error,
            )
        )

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq`` and free its slot and pages at once.

        Steps in flight may still write to these pages. That is safe: the device runs steps in
        launch order, and a new owner can only be in a later step, so it writes after them. They
        never write to a hashed page: a page is hashed only when all of its tokens have been
        computed, and writes go to tokens that have not.
        """
        if seq.slot != NO_SLOT:
            self._free_resources(seq)
        del self.orders[seq.request_id]

    def pop_in_flight(self, step_id: int) -> StepPlan:
        """Remove the oldest step in flight, which must be ``step_id``, and free its snapshot rows.

        The caller registers those rows that hold a valid snapshot.
        """
        if not self.in_flight or self.in_flight[0].step_id != step_id:
            expected = self.in_flight[0].step_id if self.in_flight else None
            raise EngineError(
                f"step {step_id} ended but the oldest step in flight is {expected}; "
                "report the steps in the order they were launched"
            )
        plan, self.in_flight = self.in_flight[0], self.in_flight[1:]
        if self.limits.num_snapshots:
            saves = (snapshot for row in plan.rows for _, snapshot in row.saves)
            self.snapshots = self.snapshots.release(saves)
        return plan

    def _open_pools(self, pools: Iterable[PagePool]) -> None:
        self.pools = [PageWriter(pool, self.num_live_pages) for pool in pools]
        # the writer of each group's pool
        self.pages = [self.pools[group.pool] for group in self.limits.groups]

    @property
    def has_row_for_snapshot(self) -> bool:
        """True if ``take_snapshot`` returns a row."""
        return self.snapshots.take(self._may_use, self.restored)[0] is not None

    def take_snapshot(self) -> int | None:
        """A row for a new snapshot; None if none is left. A tier saves the one that it replaces."""
        before = self.snapshots
        row, self.snapshots = before.take(self._may_use, self.restored)
        if self.tiers is not None and len(self.snapshots.by_hash) < len(before.by_hash):
            for page_hash, old in before.by_hash.items():
                if old.row == row:
                    self.moves.save_snapshot(page_hash, old.row)
        return row

    def _may_use(self, page_hash: bytes) -> bool:
        """False if the snapshot of this page is useless: the page is lost. A tier saves it, first
        on its way and then by its key.
        """
        return self.tiers is not None or self.pages[0].has(page_hash)

    def forget_snapshot(self, page_hash: bytes) -> None:
        """Free the snapshot of this hash, if there is one that no sequence will start from."""
        known = self.snapshots.by_hash.get(page_hash)
        if known is not None and known.row not in self.restored:
            self.snapshots = self.snapshots.forget(page_hash)

    def _free_resources(self, seq: Sequence) -> None:
        del self.running[seq.request_id]
        if (own := seq.restoring) is not None:
            self.moves.dropped.append(own.ticket)
            if own.row is not None:
                self.snapshots = self.snapshots.release((own.row,))
        self.free_slots.append(seq.slot)
        for group, pages in enumerate(seq.pages):
            self.pages[group].release(pages.ids.array(), group)

    def _pop_waiting(self, request_id: str) -> Sequence:
        at = bisect_left(self.waiting, self.orders[request_id], key=_order_of)
        seq = self.waiting[at]
        self.waiting = self.waiting[:at] + self.waiting[at + 1 :]
        return seq
