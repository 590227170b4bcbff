"""Engines in simulated time: the scheduler is the real one, a step takes what its costs say.

Owns: the loop of one replica, which is that of ``engine.loop.loop`` with a clock that is a number,
and the arrival of requests at replicas, which ``engine.link.routing`` chooses.

What is left out: the host's time beside steps, the network, tokenizers and tiers. Drawn tokens are
arbitrary, so a later prompt that contains an answer reuses the prompt's pages before it, not the
answer's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.bench.step_costs import StepCosts, work_of
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, Request, SamplingParams
from jaxinfer.core.step import Arrive, RowResult, StepDone, StepPlan, StepResult, TokenEvent
from jaxinfer.engine.link.routing import Router
from jaxinfer.engine.loop.loop import OVERLAP_DEPTH
from jaxinfer.sched.schedule import initial_state, schedule

NUM_IDS = 50_021  # of drawn tokens: a prime


class Offered(NamedTuple):
    """A request and the second in which it arrives."""

    when: float
    prompt: IntLog
    max_tokens: int


@dataclass
class Outcome:
    """The course of a request; times are seconds since the start of the run."""

    arrived: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0  # of the answer
    rank: int = 0
    first_token: float = math.inf
    ended: float = math.inf
    error: str = ""


class _Flying(NamedTuple):
    plan: StepPlan
    end: float


@dataclass
class Replica:
    """One engine. ``clock`` is the time of its next or last iteration."""

    limits: Limits
    costs: StepCosts
    depth: int = OVERLAP_DEPTH
    clock: float = 0.0
    busy: float = 0.0  # seconds of steps
    num_steps: int = 0
    _flying: deque[_Flying] = field(default_factory=deque[_Flying])
    _arrivals: list[Request] = field(default_factory=list[Request])
    _launched: bool = False  # whether the last iteration launched a step
    _free_at: float = 0.0  # of the device

    def __post_init__(self) -> None:
        self.state = initial_state(self.limits)

    def submit(self, request: Request, when: float) -> None:
        """A request arrives; an idle engine takes it up at once."""
        if self.next_time == math.inf:
            self.clock = max(self.clock, when)
        self._arrivals.append(request)

    @property
    def next_time(self) -> float:
        """The time of the next iteration; infinite if there is nothing to do."""
        if self._flying and (len(self._flying) >= self.depth or not self._launched):
            return max(self.clock, self._flying[0].end)
        if self._arrivals or self._launched:
            return self.clock
        return math.inf

    def iterate(self) -> tuple[TokenEvent, ...]:
        """Collect the step that ends now, if one is waited for; plan and launch the next one."""
        self.clock = self.next_time
        events: list[Arrive | StepDone] = [Arrive(request) for request in self._arrivals]
        self._arrivals.clear()
        if self._flying and (len(self._flying) >= self.depth or not self._launched):
            events.append(StepDone(_result(self._flying.popleft().plan)))
        self.state, output = schedule(self.state, events)
        self._launched = output.step is not None
        if output.step is not None:
            seconds = self.costs.seconds(work_of(output.step))
            self._free_at = max(self.clock, self._free_at) + seconds
            self._flying.append(_Flying(output.step, self._free_at))
            self.busy += seconds
            self.num_steps += 1
        return output.events


def _result(plan: StepPlan) -> StepResult:
    """The result of a step: arbitrary tokens, of drafts none is accepted."""
    rows = [
        RowResult(
            row.request_id,
            row.epoch,
            ((31 * row.epoch + row.num_computed_tokens) % NUM_IDS,) if row.samples else (),
        )
        for row in plan.rows
    ]
    return StepResult(plan.step_id, tuple(rows))


@dataclass
class Cluster:
    """Replicas behind a router."""

    replicas: Sequence[Replica]
    router: Router
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def run(self, offered: Iterable[Offered]) -> None:
        """Answer requests, which come in order of time."""
        ranks = range(len(self.replicas))
        for number, one in enumerate(offered):
            self._advance(one.when)
            tokens = one.prompt.array().tolist() if len(ranks) > 1 else ()
            rank = self.router.choose(tokens, ranks)
            self.router.began(rank, tokens)
            self.outcomes.append(Outcome(one.when, len(one.prompt), rank=rank))
            request = Request(
                request_id=str(number),
                prompt_token_ids=one.prompt,
                sampling=SamplingParams(max_tokens=one.max_tokens, ignore_eos=True),
                max_tokens=one.max_tokens,
                arrival=number,
                seed=0,
            )
            self.replicas[rank].submit(request, one.when)
        self._advance(math.inf)

    def _advance(self, until: float) -> None:
        """Run all iterations before this time; requests that arrive at it join later ones."""
        for replica in self.replicas:
            while (at := replica.next_time) < until:
                for event in replica.iterate():
                    self._take(event, at)

    def _take(self, event: TokenEvent, now: float) -> None:
        outcome = self.outcomes[int(event.request_id)]
        outcome.num_tokens += len(event.token_ids)
        outcome.num_cached_tokens = event.num_cached_tokens
        if event.token_ids:
            outcome.first_token = min(outcome.first_token, now)
        if event.finish_reason is not None:
            outcome.ended = now
            outcome.error = event.error if event.finish_reason is FinishReason.ERROR else ""
            tokens = outcome.num_prompt_tokens if len(self.replicas) > 1 else 0
            self.router.ended(outcome.rank, tokens)
