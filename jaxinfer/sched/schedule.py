"""The scheduler: one pure function from a state and events to the next state and a step.

It uses no clock, random numbers, I/O, locks or devices: the same state and events always give the
same result, so a recorded event log replays a run.

Starvation bound. Unfinished requests are ordered by (priority, arrival). The first of them is never
preempted, and every planned step has a row for it (a chunk of its prompt, or one token) unless the
rest of it is already in flight. So while requests arrive in order, the k-th request ends within the
sum over the first k requests of ``cdiv(tokens, chunk) + max_tokens + depth`` planned steps. Here
``tokens`` is prompt plus max_tokens (a preempted sequence prefills its own output again), ``chunk``
is the largest chunk of a single prefill row next to decodes of all other slots, a multiple of
``Limits.align``, and ``depth`` is the number of steps in flight. A request with a lower priority
number than running ones does not preempt them for admission, but no other request is admitted
before it: for it, the requests that run at its arrival also count as earlier ones.

With drafts the rest is in flight where the drafts may reach its end, and often they do not. Each
row among the last ``query_tokens * depth`` tokens may then delay the next one by the other steps in
flight, which adds ``(depth - 1) * min(max_tokens, query_tokens * depth)`` steps a request.

With tiers the first request may also wait for a load, once (``Sequence.may_restore``); steps of
others are planned in the meantime, so the bound counts only steps that are planned after the load
has ended. A tier must report the end of each load, and only the loads of a request delay it. This
holds as well where preempted sequences are offloaded (``TierPolicy.offloads``): each readmission of
a request may wait for a load, but the first request is never preempted again, so of the steps after
it has become the first only those during one load do not count. What a load brings back need not
be prefilled again, so the first term can only become smaller.

With ``prefill_first`` a planned step may leave out all decodes, also the first request's, if
prompts wait or prefill. Such a step computes a chunk of the first prompt, or its rest, so it adds
``cdiv(tokens, chunk)`` steps for every request that arrives before the k-th ends. This is bounded
for a batch, but not for an endless stream of arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from jaxinfer.core.step import (
    Abort,
    Arrive,
    BucketsLoaded,
    Event,
    Hold,
    Reset,
    StepDone,
    StepFailed,
)
from jaxinfer.core.tiers import NO_ORDERS, Loaded, Saved, TierChanged
from jaxinfer.sched.admit import arrive
from jaxinfer.sched.choose import choose_step
from jaxinfer.sched.commit import commit_step, fail_step
from jaxinfer.sched.saves import save_units
from jaxinfer.sched.state import Draft, ScheduleOutput, SchedulerState, initial_state
from jaxinfer.sched.tiers import commit_load

__all__ = ["ScheduleOutput", "SchedulerState", "initial_state", "schedule"]


def schedule(state: SchedulerState, events: Items[Event]) -> tuple[SchedulerState, ScheduleOutput]:
    """Apply ``events`` in order, then choose at most one step, or none if one of them is ``Hold``.

    ``state`` is not changed. The caller must launch ``output.step``, if any, before the next call
    and report it later as ``StepDone`` or ``StepFailed``, in launch order; any number may be in
    flight. Raises ``EngineError`` if a report does not fit the oldest step in flight.
    """
    draft, plans = Draft(state), True
    for event in events:
        match event:
            case Arrive():  # the most frequent event is tested first
                arrive(draft, event.request)
            case StepDone():
                commit_step(draft, event.result)
            case StepFailed():
                fail_step(draft, event.step_id, event.error)
            case Abort():  # an id that is unknown or has ended is ignored
                if event.request_id in draft.orders:
                    draft.end(event.request_id, event.reason)
            case BucketsLoaded():
                draft.add_buckets(event.buckets)
            case Reset():
                draft.reset(keeps_tiers=event.keeps_tiers)
            case TierChanged():
                draft.moves.change(event.added, event.removed)
            case Saved():
                draft.moves.end_saves(event.count)
            case Loaded():
                commit_load(draft, event)
            case Hold():
                plans = False
    orders, policy = NO_ORDERS, draft.tiers
    step = choose_step(draft) if plans else None
    if policy is not None:
        save_units(draft, policy, step)
        orders = draft.moves.orders
    changes = tuple([pool.index_changes for pool in draft.pools])
    output = ScheduleOutput(step, tuple(draft.events), tuple(draft.duplicates), changes, orders)
    return draft.finish(), output
