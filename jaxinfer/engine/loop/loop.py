"""The loop between scheduler and executor: events -> schedule -> launch -> collect.

Owns: the scheduler's state and the steps in flight. With overlap, step n + 1 is planned and
launched before step n's tokens are read, so that host and device work at the same time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.core.errors import EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import (
    Arrive,
    Bucket,
    Event,
    Hold,
    Reset,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
    TokenEvent,
)
from jaxinfer.engine.loop.interfaces import Observer, Tiers
from jaxinfer.sched.saves import has_saves
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, initial_state, schedule
from jaxinfer.sched.tiers import keys_of

LOGGER = "jaxinfer.engine"
OVERLAP_DEPTH = 2  # one step runs and the next one is queued; more would only add latency
LOAD_SECONDS = 0.01  # for which an iteration with nothing else to do waits for a load


class Runner[Handle](Protocol):
    """Launches and collects steps: an executor, or a ``profiler.Profile`` of it.

    It raises ``EngineError`` if the device state is lost; another exception fails one step only.
    """

    def launch(self, plan: StepPlan) -> Handle:
        """Launch a step without waiting for it."""
        ...

    def collect(self, step: Handle) -> StepResult:
        """Wait for a launched step; steps are collected in launch order."""
        ...


class StepExecutor[Handle](Runner[Handle], Protocol):
    """Runs steps: ``exec.run.executor.Executor``, or a simulated one in tests."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free what is kept for requests that have ended; rows of theirs may be in flight."""
        ...

    def free_state(self) -> None:
        """Free pages and slots on the device; no step is in flight."""
        ...

    def make_state(self) -> None:
        """Make pages and slots again, zeroed, after ``free_state``."""
        ...

    @property
    def devices(self) -> Sequence[Any]:
        """The devices of this process that run steps, each a ``jax.Device``."""
        ...

    def hlo_texts(self, bucket: Bucket) -> Iterator[str]:
        """The compiled HLO of the executables that only steps of this bucket call."""
        ...


class Iteration(NamedTuple):
    """The result of one iteration; each field is in order of time."""

    events: tuple[TokenEvent, ...]
    launched: tuple[StepPlan, ...]  # at most one
    collected: tuple[StepPlan, ...]  # failed ones included


class EngineLoop[Handle]:
    """The loop of one engine. An iteration takes new events and returns events of requests."""

    def __init__(
        self,
        executor: StepExecutor[Handle],
        limits: Limits,
        *,
        overlap: bool = True,
        buckets: Sequence[Bucket] | None = None,
        tiers: Tiers | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``buckets``: those that can be used at first (None: all); others come as events."""
        self._executor = executor
        self.runner: Runner[Handle] = executor  # or what takes a profile of it
        self._tiers, self._observers = tiers, tuple(observers)
        self._state = initial_state(limits, buckets, None if tiers is None else tiers.policy)
        self._depth = OVERLAP_DEPTH if overlap else 1
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._collected: list[StepPlan] = []  # since the last iteration
        self._ended: StepDone | StepFailed | None = None  # by ``wait_until_launchable``

    @property
    def executor(self) -> StepExecutor[Handle]:
        """The object that runs the steps."""
        return self._executor

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, an immutable value."""
        return self._state

    @property
    def idle(self) -> bool:
        """True if an iteration without new events would do nothing."""
        busy = self._in_flight or self._ended is not None or self._state.num_unfinished
        return not busy

    @property
    def saves_ahead(self) -> bool:
        """True if saves are in flight, or an idle iteration orders some (``sched.saves``)."""
        return self._tiers is not None and has_saves(self._state)

    def give_up_pages(self, *, keeps_tiers: bool = False) -> None:
        """Return all running sequences to the queue, with their tokens, and forget all prefixes,
        those in tiers too unless it ``keeps_tiers``.

        Their KV is computed again when they continue. Raises ``EngineError`` if a step is in
        flight.
        """
        self._schedule((Reset(keeps_tiers), Hold()))

    def free_state(self) -> None:
        """``give_up_pages`` but keep tiers, and free the device's memory of pages and slots."""
        self.give_up_pages(keeps_tiers=True)
        if self._tiers is not None:
            self._tiers.settle()
        self._executor.free_state()

    def make_state(self) -> None:
        """Make pages and slots again after ``free_state``."""
        self._executor.make_state()

    def wait_until_launchable(self) -> bool:
        """Return once another step may be launched.

        If the limit of steps in flight is reached, it waits for the oldest one and returns True.
        The next iteration handles that step's result, and events that arrive while this waits.
        """
        if self._ended is not None or len(self._in_flight) < self._depth:
            return False
        self._ended = self._collect()
        return True

    def iterate(self, events: tuple[Event, ...]) -> Iteration:
        """Apply the events and the step collected by ``wait_until_launchable``; launch a step.

        If no step can be planned, collect steps in flight until one has events of requests.
        """
        self.wait_until_launchable()
        if self._ended is not None:
            events, self._ended = (*events, self._ended), None
        if self._tiers is not None:
            events = (*self._of_tiers(events), *events)
        news, launched = self._advance(events)
        while not launched and not news and not self.idle:
            # nothing can be planned before the device answers, or a tier
            ended = self._of_tiers()
            if not ended and self._in_flight:
                ended = (self._collect(),)
            elif not ended and self._tiers is not None and self._waits_for_tiers:
                ended = self._tiers.poll(LOAD_SECONDS)
            if not ended and not self._state.held_loads:
                break
            news, launched = self._advance(ended)
        collected, self._collected = tuple(self._collected), []
        return Iteration(news, launched, collected)

    @property
    def _waits_for_tiers(self) -> bool:
        """True if a load is in flight, or held until saves in flight have ended."""
        loading = self._tiers is not None and self._tiers.is_loading
        return loading or bool(self._state.held_loads and self._state.saving)

    def drain(self, events: tuple[Event, ...]) -> Iteration:
        """Apply the events and the results of all steps in flight, without launching another."""
        ended = () if self._ended is None else (self._ended,)
        self._ended = None
        output = self._schedule((*events, *ended, *self._drain(), Hold()))
        collected, self._collected = tuple(self._collected), []
        return Iteration(output.events, (), collected)

    def _advance(
        self, events: tuple[Event, ...]
    ) -> tuple[tuple[TokenEvent, ...], tuple[StepPlan, ...]]:
        """Schedule until a step is launched or none can be planned; returns events and the step."""
        news: tuple[TokenEvent, ...] = ()
        while True:
            output = self._schedule(events)
            news += output.events
            if output.step is None:
                return news, ()
            try:
                handle = self.runner.launch(output.step)
            except EngineError:
                raise
            except Exception as error:
                # the step's requests end with this error, all others continue
                events = (*self._drain(), _failed(output.step, error))
                continue
            self._in_flight.append((output.step, handle))
            return news, (output.step,)

    def _of_tiers(self, events: tuple[Event, ...] = ()) -> tuple[Event, ...]:
        """Events of tiers that come before ``events``."""
        if (tiers := self._tiers) is None:
            return ()
        found = tiers.poll()
        if tiers.is_shared:
            for event in events:
                if isinstance(event, Arrive):
                    found += tiers.look_up(keys_of(event.request, self._state.limits))
        return found

    def _schedule(self, events: tuple[Event, ...]) -> ScheduleOutput:
        """Apply events and plan a step: the only change of the state, so events replay a run.

        Copies to and from tiers are queued, too.
        """
        before = self._state
        try:
            self._state, output = schedule(before, events)
        except EngineError:
            for observer in self._observers:
                observer.scheduled(before, events, None, before)
            raise
        for observer in self._observers:
            observer.scheduled(before, events, output, self._state)
        if self._tiers is not None:
            self._tiers.obey(output.orders)
        if output.duplicates:
            raise EngineError(f"request ids {output.duplicates} came twice")
        ended = [event.request_id for event in output.events if event.finish_reason is not None]
        if ended:
            self._executor.forget(ended)
        return output

    def _collect(self) -> StepDone | StepFailed:
        plan, handle = self._in_flight.popleft()
        self._collected.append(plan)
        try:
            return StepDone(self.runner.collect(handle))
        except EngineError:
            raise
        except Exception as error:
            return _failed(plan, error)

    def _drain(self) -> tuple[Event, ...]:
        """Collect all steps in flight, since failures are reported in launch order too."""
        return tuple(self._collect() for _ in range(len(self._in_flight)))


def _failed(plan: StepPlan, error: Exception) -> StepFailed:
    """Log the traceback of a failed step; its requests get one sentence."""
    reason = f"step {plan.step_id} failed: {error}"
    logging.getLogger(LOGGER).error(reason, exc_info=error)
    return StepFailed(plan.step_id, reason)
