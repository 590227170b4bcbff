"""A log of the scheduler's events replays a run: no state changes without an event."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import (
    Abort,
    Arrive,
    Event,
    Hold,
    Reset,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
)
from jaxinfer.engine.loop import loop as loop_module
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.interfaces import Weights
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, initial_state, schedule
from kit.drive import make_limits, plain
from kit.fake_executor import VOCAB, FakeDevice


class Device(FakeDevice):
    """``fails`` lets the next launch or collection fail."""

    fails = ""

    def launch(self, plan: StepPlan) -> StepResult:
        self._fail("launch")
        return super().launch(plan)

    def collect(self, step: StepResult) -> StepResult:
        self._fail("collect")
        return super().collect(step)

    def _fail(self, what: str) -> None:
        if self.fails == what:
            self.fails = ""
            raise RuntimeError(f"no {what}")


class NoWeights:
    """Weights of an engine whose device needs none."""

    def replace(self, params: object) -> None:
        pass

    def sleep(self, level: int) -> None:
        pass

    def wake_up(self) -> bool:
        return True


def test_a_log_of_events_replays_to_equal_states(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[tuple[Event, ...], Any]] = []

    def recorded(
        state: SchedulerState, events: tuple[Event, ...]
    ) -> tuple[SchedulerState, ScheduleOutput]:
        result = schedule(state, events)
        log.append((events, plain(result)))
        return result

    monkeypatch.setattr(loop_module, "schedule", recorded)
    limits = make_limits(num_pages=17)  # sequences are preempted
    device = Device(limits)
    facts = ModelFacts("fake", VOCAB, (), SamplingParams())
    engine = Engine(device, limits, facts, None, weights=cast("Weights", NoWeights()))
    names = iter(range(100))

    def run(num_steps: int, num_requests: int = 3) -> None:
        """Begin requests with a common prefix, and run some steps."""
        for _ in range(num_requests):
            number = next(names)
            prompt = [*range(1, 10), number % 5, 3]
            sampling = SamplingParams(max_tokens=20, ignore_eos=True, n=1 + number % 2)
            engine.add_request(str(number), RequestSpec(prompt, sampling))
        for _ in range(num_steps):
            engine.step()

    run(9)
    engine.drain()
    engine.replace_weights({})
    run(5)
    device.fails = "launch"
    run(4)
    device.fails = "collect"
    engine.abort(str(next(names) - 1))
    run(6)
    engine.drain()
    engine.sleep()
    engine.wake_up()
    run(3, 0)
    engine.drain()
    engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()

    seen = {type(event) for events, _ in log for event in events}
    assert seen == {Arrive, Abort, StepDone, StepFailed, Reset, Hold}
    assert engine.stats().num_preemptions > 5
    state = initial_state(limits)
    for events, expected in log:
        state, output = schedule(state, events)
        assert plain((state, output)) == expected
    assert plain(state) == plain(engine._loop.state)
