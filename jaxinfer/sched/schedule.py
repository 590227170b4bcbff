"""The scheduler: one pure function from a state and events to the next state and a step.

Owns: the order of things in a call. No clock, random, I/O, lock or device here: the same state and
events always give the same result, so a recorded event log replays a run.

Starvation bound. Call unfinished request r ahead of q if its (priority, arrival) is lower. The
first of all unfinished requests is never preempted, and every planned step computes for it: a
chunk of its prompt, or one token; unless all of it is already in flight. So while arrivals come in
order, the k-th request ends within the sum over the first k of
``cdiv(tokens, chunk) + max_tokens + depth`` planned steps; ``tokens`` is prompt plus max_tokens
(a preempted sequence prefills its own output again), ``chunk`` what a prefill row alone with
max_num_seqs - 1 decodes may take, ``depth`` the steps in flight. With snapshots a prefill is cut at
two borders at most, so each request may take two steps more. A request that arrives with a
lower priority number than running ones does not preempt them for admission, but nobody is admitted
before it; add the requests running at its arrival to those ahead.

With ``prefill_first`` a planned step may leave decodes out, the first one too, for prompts that
wait or prefill. It then computes for the first of those that prefill, and ends its prefill or gives
it a chunk, so it adds ``cdiv(tokens, chunk)`` steps for every request that arrives before the k-th
ends: no more for a batch, but a stream of arrivals that never stops has no bound.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import Abort, Arrive, Event, StepDone, StepFailed
from jaxinfer.sched.admit import arrive
from jaxinfer.sched.choose import choose_step
from jaxinfer.sched.commit import commit_step, fail_step
from jaxinfer.sched.state import Draft, ScheduleOutput, SchedulerState, initial_state

__all__ = ["ScheduleOutput", "SchedulerState", "initial_state", "schedule"]


def schedule(state: SchedulerState, events: Items[Event]) -> tuple[SchedulerState, ScheduleOutput]:
    """Apply ``events`` in order, then choose at most one step.

    ``state`` is unchanged. The caller launches ``output.step``, if any, before the next call and
    reports it later by ``StepDone`` or ``StepFailed``, in launch order; any number may be in
    flight. Raises ``EngineError`` when such a report does not fit the oldest step in flight.
    """
    draft = Draft(state)
    for event in events:
        match event:
            case Arrive():  # the one that comes in hundreds
                arrive(draft, event.request)
            case StepDone():
                commit_step(draft, event.result)
            case StepFailed():
                fail_step(draft, event.step_id, event.error)
            case Abort():
                abort(draft, event.request_id, event.reason)
    step = choose_step(draft)
    output = ScheduleOutput(step, tuple(draft.events), tuple(draft.duplicates))
    return draft.finish(), output


def abort(draft: Draft, request_id: str, reason: FinishReason) -> None:
    """End a request early; unknown and ended ones are left alone."""
    if request_id in draft.orders:
        draft.end(request_id, reason)
