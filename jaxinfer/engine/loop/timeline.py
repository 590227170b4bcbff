"""The times of sequences and steps.

A sequence has times from its arrival to its end. A step's time counts from its launch or, with
overlap, from the end of the step before it, if that is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from jaxinfer.core.step import StepPlan
from jaxinfer.engine.loop.loop import Iteration
from jaxinfer.engine.requests.news import StepKind, StepRecord
from jaxinfer.engine.requests.outputs import SequenceTimes


class Timeline:
    """Records times of sequences and steps; ``clock`` is ``time.monotonic`` outside tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences: dict[str, SequenceTimes] = {}
        self._launched: dict[int, float] = {}
        self._last_finish = 0.0
        self._ended: float | None = None  # end of the first step that the next iteration reports

    def arrive(self, sequences: tuple[str, ...]) -> None:
        """Record the arrival of sequences."""
        now = self._clock()
        for name in sequences:
            self._sequences[name] = SequenceTimes(now)

    def step_ended(self) -> None:
        """Record the end of the oldest step, which the next iteration reports."""
        self._ended = self._clock()

    def record(self, iteration: Iteration) -> tuple[tuple[StepRecord, ...], tuple[str, ...]]:
        """Record an iteration; returns its finished steps and the sequences with a first slot."""
        now = self._clock()
        started: list[str] = []
        for plan in iteration.launched:
            self._launched[plan.step_id] = now
            for admission in plan.admissions:
                name = admission.request.request_id
                times = self._sequences[name]
                if times.started:
                    times = replace(times, num_preemptions=times.num_preemptions + 1)
                else:
                    times = replace(times, started=now)
                    started.append(name)
                self._sequences[name] = times
        ended, self._ended = self._ended or now, None
        records = [
            self._step_record(plan, now if index else ended)
            for index, plan in enumerate(iteration.collected)
        ]
        return tuple(records), tuple(started)

    def token(self, sequence: str) -> bool:
        """Record a token of a sequence; returns whether it is the first."""
        times = self._sequences[sequence]
        if times.first_token:
            return False
        self._sequences[sequence] = replace(times, first_token=self._clock())
        return True

    def finish(self, sequence: str) -> SequenceTimes | None:
        """Remove a sequence; returns its times, or None if it ended before its first token."""
        times = self._sequences.pop(sequence)
        return replace(times, finished=self._clock()) if times.first_token else None

    def _step_record(self, plan: StepPlan, now: float) -> StepRecord:
        # a step that failed at launch has no launch time, and took none
        began = max(self._launched.pop(plan.step_id, now), self._last_finish)
        self._last_finish = now
        kind = StepKind.MIXED if plan.decodes else StepKind.PREFILL
        if not plan.prefills:
            kind = StepKind.DECODE
        num_tokens = sum([row.num_scheduled_tokens for row in plan.rows])
        return StepRecord(kind, num_tokens, plan.bucket.num_tokens, max(now - began, 0.0))
