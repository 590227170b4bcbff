"""Replays a recording on the host: the scheduler gets the recorded events, and plans the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from jaxinfer.core.errors import EngineError, RecordingError
from jaxinfer.core.step import StepDone
from jaxinfer.engine.record.codec import (
    Call,
    Checkpoint,
    Note,
    Record,
    Summary,
    decode,
    summary_of,
)
from jaxinfer.engine.record.file import Header, open_ring
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, schedule

COUNTS = ("running", "waiting", "free slots", "preemptions")  # the first ones of ``Summary.counts``
COUNTS_OF_POOL = ("fresh pages taken", "cached pages taken", "cached pages", "free pages")


class Difference(NamedTuple):
    """The first place at which a replay differs from its recording."""

    call: int
    step_id: int  # -1: the call planned none
    text: str


@dataclass
class Report:
    """How far a replay has come, and the first difference, if there is one."""

    header: Header
    first_call: int = -1
    num_calls: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    last_step: int = -1  # that was planned
    last_done: int = -1
    is_torn: bool = False
    difference: Difference | None = None


class Follower(Protocol):
    """Runs beside a replay, with each call that was replayed."""

    def begin(self, state: SchedulerState) -> None:
        """The replay begins in this state."""
        ...

    def note(self, note: Note) -> None:
        """The notes of the engine before the next call."""
        ...

    def events(self, call: Call, state: SchedulerState) -> Difference | None:
        """A call's events, before the scheduler gets them in this state; returns what differs."""
        ...

    def planned(self, call: Call, output: ScheduleOutput) -> Difference | None:
        """The result of the call."""
        ...


class Recording:
    """A recording that was opened; raises ``RecordingError`` where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._files = open_ring(path)
        self.header = self._files[0].header
        self.is_torn = False

    def records(self) -> Iterator[Record]:
        """All records, once. What later files begin with, a state and the weights, is left out
        where the calls go on without a gap; after one, replay goes on from the state.
        """
        next_call, is_known = -1, False
        for file in self._files:
            for body in file.bodies():
                record = decode(body, self.header.limits)
                if isinstance(record, Checkpoint):
                    is_known = record.number == next_call
                elif isinstance(record, Call):
                    next_call, is_known = record.number + 1, False
                if not is_known:
                    yield record
            self.is_torn = file.is_torn


def replay(
    recording: Recording, *, until: int | None = None, follower: Follower | None = None
) -> Report:
    """Replay a recording up to the first difference, or up to step ``until``.

    Raises ``RecordingError`` if the recording has no state to begin with.
    """
    report, state = Report(recording.header), None
    for record in recording.records():
        if isinstance(record, Checkpoint):
            state = record.state
            if follower is not None:
                follower.begin(state)
            continue
        if state is None:
            raise RecordingError("the recording has no state of the scheduler to begin with")
        if isinstance(record, Note):
            if follower is not None:
                follower.note(record)
            continue
        state = _replayed(record, state, report, follower)
        reached = report.last_step if follower is None else report.last_done
        if report.difference is not None or (until is not None and reached >= until):
            break
    report.is_torn = recording.is_torn
    return report


def _replayed(
    call: Call, state: SchedulerState, report: Report, follower: Follower | None
) -> SchedulerState:
    """Replay one call; returns the next state."""
    if report.first_call < 0:
        report.first_call = call.number
    if follower is not None:
        report.difference = follower.events(call, state)
        if report.difference is not None:
            return state
    try:
        after, output = schedule(state, call.events)
    except EngineError as error:
        if call.summary is not None:
            text = f"the scheduler raised ({error}), and did not in the recording"
            report.difference = Difference(call.number, -1, text)
        return state
    own = summary_of(output, after)
    if call.summary != own:
        text = difference_of(call.summary, own)
        report.difference = Difference(call.number, own.step_id, text)
        return after
    report.num_calls += 1
    done = [event.result for event in call.events if isinstance(event, StepDone)]
    report.num_tokens += sum(len(row.token_ids) for result in done for row in result.rows)
    report.last_done = max([report.last_done, *(result.step_id for result in done)])
    if output.step is not None:
        report.num_steps, report.last_step = report.num_steps + 1, output.step.step_id
    if follower is not None:
        report.difference = follower.planned(call, output)
    return after


def difference_of(recorded: Summary | None, own: Summary) -> str:
    """A sentence on the first field in which two summaries differ."""
    if recorded is None:
        return "the scheduler raised in the recording, and does not here"
    for name in Summary._fields[:-1]:
        was, now = getattr(recorded, name), getattr(own, name)
        if was == now:
            continue
        if isinstance(was, tuple):
            at, was, now = _first(cast("tuple[Any, ...]", was), now)
            name = f"{name}[{at}]"
        return f"the plan has {name} {was} in the recording and {now} here"
    names = [*COUNTS]
    for pool in range((len(own.counts) - len(COUNTS)) // len(COUNTS_OF_POOL)):
        names += [f"{name} of pool {pool}" for name in COUNTS_OF_POOL]
    counts = zip(names, recorded.counts, own.counts, strict=False)
    name, was, now = next(
        (one for one in counts if one[1] != one[2]), ("pools", "others", "others")
    )
    return f"after the call the scheduler has {name} {was} in the recording and {now} here"


def _first(was: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[int, Any, Any]:
    """The first index at which two tuples differ, and the two items."""
    pairs = enumerate(zip_longest(was, now, fillvalue="none"))
    return next((at, one, other) for at, (one, other) in pairs if one != other)
