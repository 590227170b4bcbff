"""The thin loop between two pure functions: events -> schedule -> launch -> collect.

Owns: the scheduler's state, the steps in flight, and the order of a turn. With overlap, step n + 1
is planned and launched before step n's tokens are read, so the host works while the device does.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple, Protocol

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import EngineError
from jaxinfer.core.step import Event, StepDone, StepFailed, StepPlan, StepResult, TokenEvent
from jaxinfer.sched.schedule import SchedulerState, initial_state, schedule

LOGGER = "jaxinfer.engine"
OVERLAP_DEPTH = 2  # one step runs while the next waits behind it; more would only add latency


class StepExecutor[Handle](Protocol):
    """What runs steps: the real executor, or a scripted one in tests.

    An ``EngineError`` says that the device state is lost; any other exception is about one step.
    """

    def launch(self, plan: StepPlan) -> Handle:
        """Queue a step without waiting for it."""
        ...

    def collect(self, step: Handle) -> StepResult:
        """Wait for a launched step; steps are collected in launch order."""
        ...


class Turn(NamedTuple):
    """What a turn did, in order of time within each part."""

    events: tuple[TokenEvent, ...]
    launched: tuple[StepPlan, ...]  # at most one
    collected: tuple[StepPlan, ...]  # failed ones included


class EngineLoop[Handle]:
    """One engine's loop. A turn takes the new events and returns news of requests."""

    def __init__(
        self,
        executor: StepExecutor[Handle],
        limits: Limits,
        *,
        overlap: bool = True,
    ) -> None:
        self._executor = executor
        self._state = initial_state(limits)
        self._depth = OVERLAP_DEPTH if overlap else 1
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._collected: list[StepPlan] = []  # since the last turn
        self._ended: StepDone | StepFailed | None = None  # what ``wait_for_room`` collected

    @property
    def state(self) -> SchedulerState:
        """The scheduler's present state; a value, safe to keep."""
        return self._state

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do until a new event comes."""
        waits = self._in_flight or self._ended is not None or self._state.num_unfinished
        return not waits

    def wait_for_room(self) -> bool:
        """Return once another step may be launched: when as many are in flight as may be, the
        oldest has to end, and the result is True. What comes until then is still in time for the
        turn after it.
        """
        if self._ended is not None or len(self._in_flight) < self._depth:
            return False
        self._ended = self._collect()
        return True

    def turn(self, events: tuple[Event, ...]) -> Turn:
        """Apply events and what was waited for, and launch the next step if there is one; without
        it wait for steps in flight until there is news, which then waits for no further one.
        """
        self.wait_for_room()
        if self._ended is not None:
            events, self._ended = (*events, self._ended), None
        news, launched = self._advance(events)
        while not launched and not news and self._in_flight:
            # nothing can be planned before the device answers
            news, launched = self._advance((self._collect(),))
        collected, self._collected = tuple(self._collected), []
        return Turn(news, launched, collected)

    def _advance(
        self, events: tuple[Event, ...]
    ) -> tuple[tuple[TokenEvent, ...], tuple[StepPlan, ...]]:
        """Schedule until a step is launched or none can be; returns news and the launched step."""
        news: tuple[TokenEvent, ...] = ()
        while True:
            self._state, output = schedule(self._state, events)
            if output.duplicates:
                raise EngineError(f"request ids {output.duplicates} came twice")
            news += output.events
            if output.step is None:
                return news, ()
            try:
                handle = self._executor.launch(output.step)
            except EngineError:
                raise
            except Exception as error:
                # the step's requests end with the message; the loop goes on with the others
                events = (*self._drain(), _failed(output.step, error))
                continue
            self._in_flight.append((output.step, handle))
            return news, (output.step,)

    def _collect(self) -> StepDone | StepFailed:
        plan, handle = self._in_flight.popleft()
        self._collected.append(plan)
        try:
            return StepDone(self._executor.collect(handle))
        except EngineError:
            raise
        except Exception as error:
            return _failed(plan, error)

    def _drain(self) -> tuple[Event, ...]:
        """Collect every older step: failures are reported in launch order too."""
        return tuple(self._collect() for _ in range(len(self._in_flight)))


def _failed(plan: StepPlan, error: Exception) -> StepFailed:
    """The requests are told in a sentence; who runs the engine needs to know where it was."""
    reason = f"step {plan.step_id} failed: {error}"
    logging.getLogger(LOGGER).error(reason, exc_info=error)
    return StepFailed(plan.step_id, reason)
