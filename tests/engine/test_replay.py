"""A log of the scheduler's events replays a run: no state changes without an event."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.step import Abort, Arrive, Event, Hold, Reset, StepDone, StepFailed
from jaxinfer.engine.loop import loop as loop_module
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, initial_state, schedule
from kit.drive import plain
from kit.recorded import Run


def test_a_log_of_events_replays_to_equal_states(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[tuple[Event, ...], Any]] = []

    def recorded(
        state: SchedulerState, events: tuple[Event, ...]
    ) -> tuple[SchedulerState, ScheduleOutput]:
        result = schedule(state, events)
        log.append((events, plain(result)))
        return result

    monkeypatch.setattr(loop_module, "schedule", recorded)
    run = Run()
    run.all_events()

    seen = {type(event) for events, _ in log for event in events}
    assert seen == {Arrive, Abort, StepDone, StepFailed, Reset, Hold}
    assert run.engine.stats().num_preemptions > 5
    state = initial_state(run.limits)
    for events, expected in log:
        state, output = schedule(state, events)
        assert plain((state, output)) == expected
    assert plain(state) == plain(run.engine._loop.state)
