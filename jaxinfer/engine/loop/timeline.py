"""When things happen: to each sequence, and to each step.

Owns: the engine's clock. A sequence's times follow it from arrival to its end; a step's time is
what it added to the run: with overlap it is launched early and starts when its predecessor ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.core.step import StepPlan
from jaxinfer.engine.loop.loop import Turn
from jaxinfer.engine.news import StepKind, StepRecord
from jaxinfer.engine.outputs import SequenceTimes


@dataclass(slots=True)
class _Times:
    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    num_admissions: int = 0


class Timeline:
    """Notes times of sequences and steps; ``clock`` is ``time.monotonic`` outside of tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sequences: dict[str, _Times] = {}
        self._launched: dict[int, float] = {}
        self._last_finish = 0.0
        self._ended: float | None = None  # when the next turn's first finished step did

    def arrive(self, sequences: tuple[str, ...]) -> None:
        """Sequences enter."""
        now = self._clock()
        for name in sequences:
            self._sequences[name] = _Times(now)

    def step_ended(self) -> None:
        """The oldest step has ended, and the turn that tells of it is still to come."""
        self._ended = self._clock()

    def turn(self, turn: Turn) -> tuple[tuple[StepRecord, ...], tuple[str, ...]]:
        """A turn has ended: its finished steps, and the sequences that got their first slot."""
        now = self._clock()
        started: list[str] = []
        for plan in turn.launched:
            self._launched[plan.step_id] = now
            for admission in plan.admissions:
                times = self._sequences[admission.request.request_id]
                times.num_admissions += 1
                if times.num_admissions == 1:
                    times.started = now
                    started.append(admission.request.request_id)
        ended, self._ended = self._ended or now, None
        records = tuple(
            self._record(plan, now if index else ended) for index, plan in enumerate(turn.collected)
        )
        return records, tuple(started)

    def token(self, sequence: str) -> bool:
        """A sequence has drawn a token; says whether it is its first."""
        times = self._sequences[sequence]
        if times.first_token:
            return False
        times.first_token = self._clock()
        return True

    def finish(self, sequence: str) -> SequenceTimes | None:
        """Forget a sequence; its times, unless it ended before its first token."""
        times = self._sequences.pop(sequence)
        if not times.first_token:
            return None
        return SequenceTimes(
            arrived=times.arrived,
            started=times.started,
            first_token=times.first_token,
            finished=self._clock(),
            num_preemptions=times.num_admissions - 1,
        )

    def _record(self, plan: StepPlan, now: float) -> StepRecord:
        # a step that failed at launch has no launch time, and took none
        began = max(self._launched.pop(plan.step_id, now), self._last_finish)
        self._last_finish = now
        kind = StepKind.MIXED if plan.decodes else StepKind.PREFILL
        if not plan.prefills:
            kind = StepKind.DECODE
        num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
        return StepRecord(kind, num_tokens, plan.bucket.num_tokens, max(now - began, 0.0))
