"""Drives ``schedule`` with the fake executor: scripted arrivals, aborts, failures and depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from immutables import Map

from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.points import Point
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.shapes import ladder
from jaxinfer.core.step import (
    TAPS,
    Arrive,
    Bucket,
    Event,
    Hold,
    Reset,
    StepDone,
    StepPlan,
    StepResult,
    TokenEvent,
)
from jaxinfer.core.tiers import CostModel, SaveAhead, TierChanged, TierPolicy
from jaxinfer.exec.tiers.runner import TierRunner, policy_of
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, initial_state, schedule
from kit.fake_executor import FakeExecutor
from kit.fake_tiers import FakeMover
from kit.invariants import check, check_ahead, check_waits

EOS = 7
POINT = Point("embed", (1,), "float32")  # of tests in which requests tap or steer


def bucket_table(
    max_num_seqs: int, max_num_batched_tokens: int, query_tokens: int = 1
) -> tuple[Bucket, ...]:
    """Decode buckets, prefill buckets and mixed ones for all decodes, as the engine makes them."""
    tokens = [t for t in ladder(1, max_num_batched_tokens, 2) if t >= 8] or [max_num_batched_tokens]
    return (
        *(Bucket(d, query_tokens=q) for q in {1, query_tokens} for d in ladder(1, max_num_seqs, 2)),
        *(Bucket(0, t, min(4, t)) for t in tokens),
        *(Bucket(max_num_seqs, t, min(4, t), True, query_tokens) for t in tokens),
    )


def make_limits(**changes: Any) -> Limits:
    """Small limits with a fitting bucket table."""
    values: dict[str, Any] = {
        "num_pages": 41,
        "page_size": 4,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
    }
    values.update(changes)
    if isinstance(values["num_pages"], int):
        values["num_pages"] = (values["num_pages"],)
    query_tokens = values.pop("query_tokens", 1)
    buckets = bucket_table(values["max_num_seqs"], values["max_num_batched_tokens"], query_tokens)
    if values.get("points"):
        tapping = (b for b in buckets if b.scores or not b.num_prefills)
        buckets = (*buckets, *(msgspec.structs.replace(b, variants=(TAPS,)) for b in tapping))
    values.setdefault("buckets", buckets)
    return Limits(**values)


def make_request(request_id: str, prompt: Sequence[int], **changes: Any) -> Request:
    """A request; the sampling fields among ``changes`` go into its sampling parameters."""
    top = {
        name: changes.pop(name)
        for name in ("eos_token_ids", "arrival", "priority", "cache_salt", "pools", "steering")
        if name in changes
    }
    seed = changes.get("seed", 0)
    max_tokens = changes.setdefault("max_tokens", 8)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**changes),
        max_tokens=max_tokens,
        seed=seed,
        **top,
    )


@dataclass
class Drive:
    """One run. ``depth`` steps may be in flight; every state is checked."""

    limits: Limits
    depth: int = 2
    twice: bool = False  # make every call twice and check that it is pure
    # the connector of its tiers; None: there are none
    connector: Callable[[Forms], Connector] | None = None
    cost: CostModel = field(default_factory=CostModel)
    offloads: bool = False  # see ``TierPolicy``
    most_save_bytes: int = 1 << 62
    watermark: float = TierPolicy().watermark
    ahead: SaveAhead | None = None
    num_looks: int = 0  # see ``FakeMover``
    most_saving_bytes: int = 1 << 62  # see ``TierRunner``
    # each call: the state before it, its events and output
    recorded: list[tuple[SchedulerState, tuple[Event, ...], ScheduleOutput]] | None = None
    plans: list[StepPlan] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    last: ScheduleOutput = field(default_factory=lambda: ScheduleOutput(None, ()))
    num_lost: int = 0  # units that tiers have replaced
    num_ahead: int = 0  # units that were saved before they were evicted, where this is checked

    def __post_init__(self) -> None:
        self.executor = self._new_executor()
        self.tiers: TierRunner | None = None
        if self.connector is not None:
            mover = FakeMover(self.limits, lambda: self.executor, self.num_looks)
            policy = policy_of(mover.forms, self.limits, self.cost, offloads=self.offloads)
            policy = msgspec.structs.replace(
                policy,
                most_save_bytes=self.most_save_bytes,
                watermark=self.watermark,
                ahead=self.ahead,
            )
            self.tiers = TierRunner(
                mover,
                self.connector(mover.forms),
                policy,
                most_saving_bytes=self.most_saving_bytes,
            )
        policy = None if self.tiers is None else self.tiers.policy
        self.state = initial_state(self.limits, tiers=policy)
        self.flying: list[StepResult] = []
        self._indices: list[dict[bytes, int]] = [{} for _ in self.limits.num_pages]  # pages by key

    def _new_executor(self) -> FakeExecutor:
        limits = self.limits
        return FakeExecutor(limits.page_size, limits.groups, limits.num_snapshots, limits.align)

    def call(self, *events: Event) -> ScheduleOutput:
        """One call of ``schedule``; a chosen step runs at once, its result waits in ``flying``."""
        if self.tiers is not None:
            assert len(self.state.saving) == self.tiers.num_saving, "saves are lost"
            events = (*self.tiers.poll(), *events)
            self.num_lost += sum(len(e.removed) for e in events if isinstance(e, TierChanged))
        before = self.state
        self.state, self.last = self._scheduled(events)
        if self.recorded is not None:
            self.recorded.append((before, events, self.last))
        check(self.state)
        if not self.offloads:
            check_waits(self.state, self.last.orders, self.last.step)
        if self.ahead is not None and not self.watermark and not self.offloads:
            self.num_ahead += check_ahead(self.state, self.last.orders, self.ahead)
        if self.tiers is not None:
            self.tiers.obey(self.last.orders)
        self._follow_index(events)
        self.events += self.last.events
        if (plan := self.last.step) is not None:
            self.plans.append(plan)
            hashed = [frozenset(pool.hash_by_page) for pool in self.state.pools]
            self.flying.append(self.executor.run(plan, hashed))
        return self.last

    def _follow_index(self, events: tuple[Event, ...]) -> None:
        """The changes that calls report give the prefix index of each pool."""
        pools = zip(self._indices, self.last.index_changes, self.state.pools, strict=True)
        for index, changes, pool in pools:
            if any(isinstance(event, Reset) for event in events):
                index.clear()
            for change in changes:
                for key, page in ((unit.key, unit.place) for unit in change.units):
                    if change.is_added:
                        assert index.setdefault(key, page) == page
                    else:
                        assert index.pop(key) == page
            assert index == dict(pool.page_by_hash)

    def tick(self, *events: Event) -> ScheduleOutput:
        """One iteration of the engine's loop: wait if ``depth`` steps are in flight, then call.

        After an iteration that launched no step, the next one waits for the oldest step.
        """
        done: list[Event] = []
        if self.flying and (len(self.flying) >= self.depth or self.last.step is None):
            done.append(StepDone(self.flying.pop(0)))
        return self.call(*done, *events)

    def give_up_pages(self, *, keeps_tiers: bool = True) -> None:
        """Collect all steps, and go on without anything on the device, as when an engine sleeps."""
        done = [StepDone(result) for result in self.flying]
        self.flying.clear()
        self.call(*done, Reset(keeps_tiers), Hold())
        self.executor = self._new_executor()
        if self.tiers is not None and not keeps_tiers:
            self.tiers.clear(weights_changed=True)

    def arrive(self, *requests: Request) -> ScheduleOutput:
        """An iteration in which these requests arrive."""
        return self.tick(*(Arrive(request) for request in requests))

    def _scheduled(self, events: tuple[Event, ...]) -> tuple[SchedulerState, ScheduleOutput]:
        if not self.twice:
            return schedule(self.state, events)
        before = plain(self.state)
        first = schedule(self.state, events)
        kept = plain(first)
        assert plain(schedule(self.state, events)) == kept, "two calls differ"
        assert plain(first) == kept, "the second call changed the result of the first"
        assert plain(self.state) == before, "schedule changed its input"
        return first

    def finish(self, max_turns: int = 100_000) -> None:
        """Iterations until every request has ended and every step is committed."""
        for _ in range(max_turns):
            if not self.state.num_unfinished and not self.flying:
                return
            self.tick()
            loading = self.tiers is not None and self.tiers.is_loading
            idle = self.last.step is None and not self.flying and not loading
            idle = idle and not self.state.held_loads
            stuck = self.state.num_unfinished and idle
            assert not stuck, "unfinished requests, nothing in flight and no step planned"
        raise AssertionError("the run does not end")

    def tokens(self) -> dict[str, list[int]]:
        """All delivered tokens, by request."""
        out: dict[str, list[int]] = {}
        for event in self.events:
            out.setdefault(event.request_id, []).extend(event.token_ids)
        return out

    def endings(self) -> dict[str, TokenEvent]:
        """The one final event of each request that ended."""
        out: dict[str, TokenEvent] = {}
        for event in self.events:
            assert event.request_id not in out, "an event after the final one"
            if event.finish_reason is not None:
                out[event.request_id] = event
        return out


def plain(value: Any) -> Any:
    """A comparable copy of a state or output, arrays and logs as tuples."""
    if value is None or isinstance(value, (int, str, bytes, float)):
        return value  # nearly all; with this first a trace with tiers takes 13 ms (was 30)
    if isinstance(value, msgspec.Struct):
        return tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, (np.ndarray, IntLog)):
        return tuple(int(item) for item in value)
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    if isinstance(value, (Map, Mapping)):
        return frozenset((plain(key), plain(item)) for key, item in value.items())
    return value
