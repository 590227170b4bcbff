"""Saves of pages and states in tiers: what a call must save, and what it saves before it must.

A page that was evicted is saved before a step or a load writes to it; loads wait for that. So that
few must be, pages are also saved before they are evicted, in the order of eviction: those of a
watermark in every call, and with ``SaveAhead`` further ones in calls beside which nothing else is
copied and no prompt is computed, a block at a time. An idle engine calls for that (``has_saves``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import chain

from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import StepPlan
from jaxinfer.core.tiers import (
    MAX_SAVING_CALLS,
    SNAPSHOTS,
    Load,
    SaveAhead,
    TierPolicy,
    TierUnit,
    group_of,
)
from jaxinfer.sched.moves import Evicted
from jaxinfer.sched.state import Draft, SchedulerState


def has_saves(state: SchedulerState) -> bool:
    """True if an engine without requests has saves in flight, or a call without events orders some;
    always False without ``SaveAhead``.
    """
    policy, limits = state.tiers, state.limits
    if policy is None or policy.ahead is None:
        return False
    share = max(policy.watermark, policy.ahead.share)
    pairs = zip(state.pools, limits.num_pages, strict=True)
    return (
        bool(state.saving or state.evicted)
        or any(pool.offers(int(size * share)) for pool, size in pairs)
        or state.snapshots.offers(int(limits.num_snapshots * share))
    )


def save_units(draft: Draft, policy: TierPolicy, step: StepPlan | None) -> None:
    """Save what this call's step overwrites; and, within the policy's bytes, what loads overwrite,
    which are held until then, other pages that were evicted, and those and snapshots that are
    evicted next: those below the watermark, or while nothing else is to be done those of
    ``SaveAhead``.
    """
    moves, limits = draft.moves, draft.limits
    may_save = len(moves.saving) < MAX_SAVING_CALLS  # besides what must be, or launching would wait
    largest = max(policy.pool_bytes)
    left, share = policy.most_save_bytes if may_save else 0, policy.watermark
    left -= policy.num_bytes(unit.key for unit in moves.saves)

    def most(num_bytes: int) -> int:
        """The units of this size that may still be saved."""
        return max(0, left) // max(1, num_bytes)

    def save(units: Iterable[TierUnit]) -> None:
        """Save units, and count their bytes."""
        nonlocal left
        left -= policy.num_bytes(unit.key for unit in moves.save(units))

    # as each was evicted
    evicted = {(i, unit.place): unit for i, unit in moves.evicted}
    for i, pool in enumerate(draft.pools):
        removed = (change.units for change in pool.index_changes if not change.is_added)
        lost = moves.unknown(chain.from_iterable(removed))
        evicted |= {(i, unit.place): unit for unit in lost}

    def save_evicted(places: Iterable[tuple[int, int]]) -> None:
        """Save those of these pages that were evicted."""
        found = (evicted.pop(place, None) for place in places)
        save(unit for unit in found if unit is not None)

    if evicted:
        save_evicted(_written(draft, step))
    loads, moves.loads, moves.held = (*moves.held, *moves.loads), [], ()
    for load in loads:
        if load.ticket in moves.dropped:
            continue
        missing = [place for place in _places(load, limits) if place in evicted] if evicted else []
        if may_save:  # one at least: it goes on
            save_evicted(missing[: max(1, most(largest))])
        if any(place in evicted for place in missing):
            moves.held += (load,)
        else:
            moves.loads.append(load)
    if policy.ahead is not None and _is_quiet(draft, policy.ahead):
        left, share = policy.ahead.most_bytes, max(share, policy.ahead.share)
    save_evicted(tuple(evicted)[: most(largest)])
    moves.evicted = tuple(Evicted(pool, unit) for (pool, _), unit in evicted.items())
    if limits.enable_prefix_caching:
        for i, (pool, size) in enumerate(zip(draft.pools, limits.num_pages, strict=True)):
            save(pool.offer(int(size * share), most(policy.pool_bytes[i])))
    if limits.num_snapshots:
        least = int(limits.num_snapshots * share)
        found, draft.snapshots = draft.snapshots.offer(least, most(policy.state_bytes))
        for page_hash, row in found:
            moves.save_snapshot(page_hash, row)
    moves.begin_saves()


def unsaved_bytes(draft: Draft, policy: TierPolicy, counts: Items[int]) -> int:
    """The bytes that are saved before a load may write to so many new pages of each group, with
    those of the saves in flight before them; 0 if all of these pages are saved.
    """
    moves, limits, found = draft.moves, draft.limits, 0
    for number, count in enumerate(limits.of_pools(counts)):
        fresh, units = draft.pools[number].next_unsaved(count)
        evicted = {unit.place for pool, unit in moves.evicted if pool == number}
        num_pages = len(evicted.intersection(fresh)) + len(moves.unknown(units))
        found += num_pages * policy.pool_bytes[number]
    return found and found + sum(map(policy.num_bytes, moves.saving))


def _is_quiet(draft: Draft, ahead: SaveAhead) -> bool:
    """True if nothing is copied, and no prompt is computed or restored."""
    moves = draft.moves
    if moves.saving or moves.saves or moves.offloads or moves.loads or moves.held:
        return False
    if not ahead.beside_decodes:
        return not draft.in_flight and not draft.orders
    if any(plan.prefills for plan in draft.in_flight):
        return False
    return not any([seq.is_prefilling for seq in draft.running.values()])


def _written(draft: Draft, step: StepPlan | None) -> list[tuple[int, int]]:
    """The pages, by pool, to which the step writes."""
    limits, found = draft.limits, list[tuple[int, int]]()
    for row in () if step is None else step.rows:
        start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        for group, own in zip(limits.groups, row.pages, strict=True):
            size = limits.tokens_per_page(group)
            ids = own.ids.array()[start // size - own.first : cdiv(end, size) - own.first]
            found += ((group.pool, page) for page in ids.tolist())
    return found


def _places(load: Load, limits: Limits) -> list[tuple[int, int]]:
    """The pages, by pool, to which a load writes."""
    units = ((group_of(unit.key), unit.place) for unit in load.units)
    return [(limits.groups[group].pool, place) for group, place in units if group != SNAPSHOTS]
