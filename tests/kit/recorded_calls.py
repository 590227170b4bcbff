"""Calls of the scheduler in the forms of a recording, replayed from several of its states."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.core.step import Event
from jaxinfer.engine.record.codec import (
    Call,
    Checkpoint,
    decode,
    encode_call,
    encode_state,
    summary_of,
)
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, schedule

type Called = tuple[SchedulerState, tuple[Event, ...], ScheduleOutput]  # the state before it

NUM_BEGINNINGS = 4


def check_replay(calls: Sequence[Called], last: SchedulerState) -> None:
    """Check that calls are replayed to equal summaries and to the same last state: from the first
    one on, from some others, and from the first one with evicted pages, held loads or saves.
    """
    limits = last.limits
    after = [state for state, _, _ in calls[1:]] + [last]
    starts = {*range(0, len(calls), max(1, len(calls) // NUM_BEGINNINGS))}
    for name in ("evicted", "held_loads", "saving"):
        starts |= {next((i for i, one in enumerate(calls) if getattr(one[0], name)), 0)}
    for start in sorted(starts):
        body = memoryview(encode_state(start, calls[start][0]))
        record = decode(body, limits)
        assert isinstance(record, Checkpoint)
        state = record.state
        for number in range(start, len(calls)):
            _, events, output = calls[number]
            summary = summary_of(output, after[number])
            call = decode(memoryview(encode_call(number, events, summary)), limits)
            assert isinstance(call, Call)
            state, own = schedule(state, call.events)
            assert summary_of(own, state) == call.summary, f"call {number} from {start}"
        for name in ("saving", "tier_keys", "evicted", "held_loads", "tiers"):
            assert getattr(state, name) == getattr(last, name), name
