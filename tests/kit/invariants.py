"""Checks the invariants of a scheduler state, in slow and simple code."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from jaxinfer.core.step import ScheduledSeq, StepPlan
from jaxinfer.core.tiers import (
    MAX_SAVING_CALLS,
    SNAPSHOTS,
    SaveAhead,
    TierOrders,
    TierUnit,
    group_of,
    key_in,
)
from jaxinfer.sched.pages import PagePool
from jaxinfer.sched.state import NO_SLOT, SchedulerState, Sequence


def check(state: SchedulerState) -> None:
    """Raise ``AssertionError``, with a sentence, for the first invariant that does not hold."""
    for number in range(len(state.pools)):
        _check_pool(number, state)
    num_live = tuple(
        len({page for seq in state.running for page in seq.pages[group].ids})
        for group in range(len(state.limits.groups))
    )
    if state.num_live_pages != num_live:
        _fail(f"num_live is {state.num_live_pages}, but {num_live} pages of each group are live")
    _check_snapshots(state)
    _check_queues(state)
    for seq in state.running:
        _check_running(seq, state)
    for seq in state.waiting:
        counts = (
            len(seq.pages),
            seq.num_prefill_tokens,
            seq.num_computed_tokens,
            seq.num_in_flight_tokens,
            seq.num_registered_pages,
            len(seq.borders),
        )
        if seq.slot != NO_SLOT or any(counts):
            _fail(f"waiting request {seq.request_id!r} owns slot {seq.slot} or counts {counts}")


def check_ahead(state: SchedulerState, orders: TierOrders, ahead: SaveAhead) -> int:
    """Check that units are saved before they are evicted only beside nothing else, a block at a
    time; returns their number. Without a watermark and offloads no others of them are saved.
    """
    found = [unit for unit in orders.saves if _is_on_device(unit, state)]
    if not found:
        return 0
    if len(state.saving) > 1 or orders.loads or state.held_loads:
        _fail(f"{len(found)} units are saved ahead beside other copies")
    if any(seq.is_prefilling for seq in state.running):
        _fail(f"{len(found)} units are saved ahead while a prompt is computed or restored")
    if any(plan.prefills for plan in state.in_flight):
        _fail(f"{len(found)} units are saved ahead while a step of a prompt is in flight")
    if not ahead.beside_decodes and (state.num_unfinished or state.in_flight):
        _fail(f"{len(found)} units are saved ahead while requests are answered")
    assert state.tiers is not None
    if (size := state.tiers.num_bytes(unit.key for unit in found)) > ahead.most_bytes:
        _fail(f"{size} bytes are saved ahead in one call")
    return len(found)


def check_waits(state: SchedulerState, orders: TierOrders, step: StepPlan | None) -> None:
    """Check that where the saves of ``MAX_SAVING_CALLS`` were in flight only those are added that a
    step cannot be launched without: pages to which it writes, and states that it replaces.
    """
    if len(state.saving) <= MAX_SAVING_CALLS or not orders.saves:
        return
    rows = () if step is None else step.rows
    groups = [(group, own) for row in rows for group, own in enumerate(row.pages)]
    written = {(state.limits.groups[group].pool, page) for group, own in groups for page in own.ids}
    for unit in orders.saves:
        group = group_of(unit.key)
        if group != SNAPSHOTS and (state.limits.groups[group].pool, unit.place) not in written:
            _fail(f"page {unit.place} is saved while {len(state.saving) - 1} saves are in flight")


def _is_on_device(unit: TierUnit, state: SchedulerState) -> bool:
    """True if the prefix index still has a unit where it is saved from."""
    if (group := group_of(unit.key)) == SNAPSHOTS:
        rows = {key_in(SNAPSHOTS, own): known.row for own, known in state.snapshots.by_hash.items()}
        return rows.get(unit.key) == unit.place
    pool = state.pools[state.limits.groups[group].pool]
    return pool.page_by_hash.get(unit.key) == unit.place


def _check_pool(number: int, state: SchedulerState) -> None:
    pool = state.pools[number]
    owned = [set(_page_ids(seq, number, state)) for seq in state.running]
    owners = Counter(page for pages in owned for page in pages)
    fresh = pool.fresh.array()[pool.fresh_head :].tolist()
    cached = [
        page
        for position, page in enumerate(pool.cached)
        if position >= pool.cached_head and pool.stamps[page] == position
    ]
    num_pages = state.limits.num_pages[number]
    places = Counter([*fresh, *cached, *owners.keys()])
    if places != Counter(range(1, num_pages)):
        odd = [page for page in range(num_pages) if places[page] != (page > 0)]
        _fail(f"pages {odd[:8]} are not in exactly one of fresh, cached and live")
    if pool.num_cached != len(cached):
        _fail(f"num_cached is {pool.num_cached}, but {len(cached)} pages are cached")
    for page in range(num_pages):
        if pool.num_sharers[page] != max(0, owners[page] - 1):
            _fail(f"page {page} has {owners[page]} owners, num_sharers {pool.num_sharers[page]}")
        if owners[page] > 1 and page not in pool.hash_by_page:
            _fail(f"page {page} is shared by {owners[page]} sequences but not hashed")
        if (pool.stamps[page] >= pool.cached_head) != (page in cached):
            _fail(f"the stamp {pool.stamps[page]} of page {page} is wrong")
    _check_index(pool, fresh, cached)
    num_offered = sum(pool.cached_head <= pool.stamps[page] < pool.offered_head for page in cached)
    if pool.num_offered != num_offered:
        _fail(f"num_offered is {pool.num_offered}, but {num_offered} pages have been offered")


def _check_index(pool: PagePool, fresh: list[int], cached: list[int]) -> None:
    inverse = {page: page_hash for page_hash, page in pool.page_by_hash.items()}
    if inverse != dict(pool.hash_by_page) or len(inverse) != len(pool.page_by_hash):
        _fail("the two maps of the prefix index are not inverse to each other")
    if any(page in pool.hash_by_page for page in fresh):
        _fail("a fresh page is hashed")
    if any(page not in pool.hash_by_page for page in cached):
        _fail("a cached page is not hashed")
    if pool.num_sharers.flags.writeable or pool.stamps.flags.writeable:
        _fail("an array of a finished pool can be written")


def _check_snapshots(state: SchedulerState) -> None:
    """Each row is free, registered or pending, and all times of use differ.

    A registered row may outlive the page of its hash.
    """
    pool = state.snapshots
    rows = [row for plan in state.in_flight for row in plan.rows]
    pending = [snapshot for row in rows for _, snapshot in row.saves]
    loads = [seq.restoring for seq in state.running if seq.restoring is not None]
    pending += [load.row for load in loads if load.row is not None]
    known = [snapshot.row for snapshot in pool.by_hash.values()]
    if sorted([*pool.free, *known, *pending]) != list(range(state.limits.num_snapshots)):
        _fail(
            f"snapshots are not once in free {pool.free}, registered {known} and pending {pending}"
        )
    used = [snapshot.used for snapshot in pool.by_hash.values()]
    if len(set(used)) != len(used) or max(used, default=-1) >= pool.clock:
        _fail(f"snapshots were used at {used}, and the clock is {pool.clock}")


def _check_queues(state: SchedulerState) -> None:
    for name, queue in (("running", state.running), ("waiting", state.waiting)):
        orders = [seq.order for seq in queue]
        if orders != sorted(orders):
            _fail(f"{name} is not in order of (priority, arrival)")
    unfinished = {seq.request_id: seq.order for seq in (*state.running, *state.waiting)}
    if len(unfinished) != state.num_unfinished or unfinished != dict(state.orders):
        _fail("running and waiting are not exactly the unfinished requests")
    slots = sorted([*state.free_slots, *(seq.slot for seq in state.running)])
    if slots != list(range(state.limits.max_num_seqs)):
        _fail(f"slots are lost or given twice: {slots}")
    step_ids = [plan.step_id for plan in state.in_flight]
    expected = list(range(state.next_step_id - len(step_ids), state.next_step_id))
    if step_ids != expected:
        _fail(f"steps in flight are {step_ids}, expected {expected}")


def _check_running(seq: Sequence, state: SchedulerState) -> None:
    name = f"request {seq.request_id!r}"
    _check_restoring(name, seq, state)
    for number in range(len(state.pools)):
        page_ids = _page_ids(seq, number, state)
        if len(set(page_ids)) != len(page_ids):
            _fail(f"{name} lists a page twice: {page_ids}")
    rows = _rows_of(seq, state)
    if seq.num_in_flight_tokens != sum(row.most_drawn for row in rows):
        _fail(f"{name} has {seq.num_in_flight_tokens} tokens in flight, but rows say otherwise")
    num_tokens = len(seq.token_ids) + seq.num_in_flight_tokens
    draws = not (seq.is_prefilling or seq.request.pools)
    if draws and seq.num_computed_tokens != num_tokens - 1:
        _fail(f"{name} decodes at {seq.num_computed_tokens} with {num_tokens} tokens")
    if num_tokens > seq.max_num_tokens or len(seq.token_ids) >= seq.max_num_tokens:
        _fail(f"{name} has {num_tokens} tokens of at most {seq.max_num_tokens}")
    for pages, group in zip(seq.pages, state.limits.groups, strict=True):
        capacity = pages.end * state.limits.tokens_per_page(group)
        if seq.num_computed_tokens > capacity:
            _fail(f"{name} computes {seq.num_computed_tokens} tokens in pages for {capacity}")
        least = seq.first_needed(state.limits.query_tokens)
        if pages.first > state.limits.first_page(least, group):
            _fail(f"{name} has returned page {pages.first - 1}, which its next token attends to")
        if len(pages.ids) > state.limits.most_pages(group):
            _fail(f"{name} holds {len(pages.ids)} pages in {group}")
    for border in seq.borders:
        if not seq.num_computed_tokens < border < seq.num_prefill_tokens:
            _fail(f"{name} is to be saved at {border}, with {seq.num_computed_tokens} computed")
        if border % (state.limits.page_size * state.limits.reuse_step):
            _fail(f"{name} is to be saved at {border}, which is no page border")
    saved = {row.num_computed_tokens + count for row in rows for count, _ in row.saves}
    if seq.saving is not None and seq.saving not in saved:
        _fail(f"{name} holds pages for a snapshot at {seq.saving}, and steps save at {saved}")
    done = seq.num_computed_tokens - sum(row.num_scheduled_tokens for row in rows)
    if seq.num_registered_pages * state.limits.page_size > done:
        _fail(f"{name} has registered {seq.num_registered_pages} pages with {done} tokens computed")


def _check_restoring(name: str, seq: Sequence, state: SchedulerState) -> None:
    """A sequence owns the places of its load, unhashed, and computes nothing behind them."""
    if (own := seq.restoring) is None:
        return
    if not own.known < own.end < seq.num_prefill_tokens:
        _fail(f"{name} restores tokens {own.known} to {own.end} of {seq.num_prefill_tokens}")
    if seq.num_computed_tokens != own.end or _rows_of(seq, state):
        _fail(f"{name} has computed {seq.num_computed_tokens} tokens before its load has ended")
    for unit in own.units:
        if (group := group_of(unit.key)) == SNAPSHOTS:
            if unit.place != own.row:
                _fail(f"{name} loads a state to row {unit.place}, and owns {own.row}")
            continue
        pool = state.pools[state.limits.groups[group].pool]
        if unit.place not in seq.pages[group].ids:
            _fail(f"{name} loads page {unit.place}, which it does not own")
        if unit.place in pool.hash_by_page:
            _fail(f"{name} loads page {unit.place}, which is hashed")


def _rows_of(seq: Sequence, state: SchedulerState) -> list[ScheduledSeq]:
    """The rows of a sequence in the steps in flight."""
    rows = (row for plan in state.in_flight for row in plan.rows)
    return [row for row in rows if (row.request_id, row.epoch) == (seq.request_id, seq.epoch)]


def _page_ids(seq: Sequence, pool: int, state: SchedulerState) -> list[int]:
    """The pages of a pool that a sequence owns, over all groups."""
    pairs = zip(seq.pages, state.limits.groups, strict=True)
    return [page for pages, group in pairs if group.pool == pool for page in pages.ids]


def _fail(message: str) -> NoReturn:
    raise AssertionError(message)
