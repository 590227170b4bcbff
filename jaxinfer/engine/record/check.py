"""``Check``: runs the steps of a replay on a device, and compares the tokens of each row.

A recording that has lost its beginning starts in the middle of sequences whose pages are not in it.
Rows that depend on such a page are run, but not compared: they are unknown until they are computed
again from tokens. For the rest the scheduler gets the recorded tokens, so that the plans stay those
of the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.step import (
    Event,
    Reset,
    RowResult,
    ScheduledSeq,
    SlotAdmission,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
)
from jaxinfer.core.tiers import SNAPSHOTS, Load, Loaded, TierChanged, TierUnit, group_of
from jaxinfer.engine.record.codec import Call, Note, output_digest
from jaxinfer.engine.record.replay import Difference
from jaxinfer.engine.record.restores import Restores
from jaxinfer.engine.record.states import RECORDED
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState
from jaxinfer.sched.state import NO_SLOT


class StepRunner(Protocol):
    """The part of ``exec.run.executor.Executor`` that runs steps."""

    def launch(self, plan: StepPlan) -> Any:
        """Launch a step."""
        ...

    def collect(self, step: Any) -> StepResult:
        """Wait for a launched step, in the order of launch."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free what is kept for requests that have ended."""
        ...


@dataclass
class Counts:
    """The rows of a check."""

    compared: int = 0
    unknown: int = 0  # that depend on pages from before the recording


@dataclass
class Found:
    """The row at which a replay differs: its step, and the state before the step's result."""

    row: ScheduledSeq
    state: SchedulerState


class Unknown:
    """The parts made before the recording: epochs, pages of pools, and snapshots."""

    def __init__(self, state: SchedulerState) -> None:
        self._limits = state.limits
        running = [seq for seq in state.running if seq.slot != NO_SLOT]
        self._epochs = {seq.epoch for seq in running}
        self._pages = {
            (number, page) for number, pool in enumerate(state.pools) for page in pool.hash_by_page
        }
        for seq in running:
            for group, pages in zip(state.limits.groups, seq.pages, strict=True):
                self._pages |= {(group.pool, page) for page in pages.ids}
        self._snapshots = {own.row for own in state.snapshots.by_hash.values()}
        self._begun: set[int] = set(self._epochs)

    def has(self, unit: TierUnit) -> bool:
        """True if the content of a unit's place is unknown."""
        if (group := group_of(unit.key)) == SNAPSHOTS:
            return unit.place in self._snapshots
        return (self._limits.groups[group].pool, unit.place) in self._pages

    def load(self, load: Load, missing: Iterable[TierUnit]) -> None:
        """Take note of a load, without the units that are ``missing``."""
        keys = {unit.key for unit in missing}
        if keys:
            self._epochs.add(load.ticket)  # the number of the admission
        for unit in load.units:
            group, is_missing = group_of(unit.key), unit.key in keys
            if group == SNAPSHOTS:
                _put(self._snapshots, (unit.place,), is_missing)
            else:
                _put(self._pages, ((self._limits.groups[group].pool, unit.place),), is_missing)

    def follow(self, row: ScheduledSeq) -> bool:
        """Take note of a row of a step; returns whether its result is unknown."""
        limits = self._limits
        if row.epoch not in self._begun:
            self._begun.add(row.epoch)
            reused = row.reads is not None and row.reads in self._snapshots
            for group, pages in zip(limits.groups, row.pages, strict=True):
                before = row.num_computed_tokens // limits.tokens_per_page(group) - pages.first
                ids = pages.ids[: max(before, 0)]
                reused |= any((group.pool, page) in self._pages for page in ids)
            if reused:
                self._epochs.add(row.epoch)
        is_unknown = row.epoch in self._epochs
        for group, pages in zip(limits.groups, row.pages, strict=True):
            first = row.num_computed_tokens // limits.tokens_per_page(group) - pages.first
            written = ((group.pool, page) for page in pages.ids[max(first, 0) :])
            _put(self._pages, written, is_unknown)
        _put(self._snapshots, (snapshot for _, snapshot in row.saves), is_unknown)
        return is_unknown


def _put[T](known: set[T], items: Iterable[T], is_in: bool) -> None:
    """Add or remove items."""
    (known.update if is_in else known.difference_update)(items)


@dataclass
class _Launched:
    plan: StepPlan
    handle: Any  # or the exception of the launch
    unknown: frozenset[tuple[str, int]]  # rows, by request id and epoch
    result: StepResult | Exception | None = None  # once it has been collected


@dataclass
class Check:
    """A ``Follower`` of a replay that runs the steps.

    ``compiled`` gives the constraint of a request again, ``load_weights`` lets the later steps read
    weights from a reference. ``blind`` says why nothing is compared any longer, if it is not empty.
    """

    runner: StepRunner
    compiled: Callable[[Request], Constraint]
    load_weights: Callable[[str], None]
    counts: Counts = field(default_factory=Counts)
    restores: Restores | None = None  # of an engine with tiers
    blind: str = ""
    found: Found | None = None
    _launched: deque[_Launched] = field(default_factory=deque[_Launched])
    _missing: set[int] = field(default_factory=set[int])  # steps from before the recording
    _begun: tuple[SlotAdmission, ...] = ()  # slots that the first step finds in use

    def begin(self, state: SchedulerState) -> None:
        """See ``Follower``."""
        self.drain()
        self._unknown = Unknown(state)
        self._missing = {plan.step_id for plan in state.in_flight}
        self._begun = tuple(
            SlotAdmission(seq.slot, _unconstrained(seq.request), seq.token_ids, seq.epoch)
            for seq in state.running
            if seq.slot != NO_SLOT
        )

    def note(self, note: Note) -> None:
        """See ``Follower``."""
        if self.blind or note.kind != "weights":
            return
        if not note.text:
            self.blind = (
                f"before call {note.number} the engine got weights as a tree, which is not in the "
                "recording"
            )
            return
        try:
            self.load_weights(note.text)
        except JaxinferError as error:
            self.blind = (
                f"before call {note.number} the engine got weights from {note.text}, which cannot "
                f"be loaded here ({error})"
            )

    def events(self, call: Call, state: SchedulerState) -> Difference | None:
        """See ``Follower``: collects the steps whose results are events of the call."""
        for event in call.events:
            if self.blind:
                continue
            if not isinstance(event, StepDone | StepFailed):
                self._moved(event)
                continue
            step_id = event.result.step_id if isinstance(event, StepDone) else event.step_id
            if step_id in self._missing:
                continue
            launched = self._launched.popleft()
            own = self._collected(launched)
            if isinstance(event, StepFailed):
                continue
            if isinstance(own, Exception):
                text = f"the step failed here ({own}), and did not in the recording"
                return Difference(call.number, step_id, text)
            if (text := self._compared(call, launched, event.result, own, state)) is not None:
                return Difference(call.number, step_id, text)
        return None

    def planned(self, call: Call, output: ScheduleOutput) -> Difference | None:
        """See ``Follower``: launches the step."""
        if self.blind:
            return None
        ended = [event.request_id for event in output.events if event.finish_reason is not None]
        if ended:
            self.runner.forget(ended)
        if self.restores is not None:
            orders = output.orders
            if orders.saves:
                self._finish_steps()
            missing = self.restores.obey(orders, lambda unit: not self._unknown.has(unit))
            for load in orders.loads:
                self._unknown.load(load, [unit for unit in missing if unit in load.units])
        if output.step is None:
            return None
        plan = self._runnable(output.step)
        unknown = {(row.request_id, row.epoch) for row in plan.rows if self._unknown.follow(row)}
        try:
            handle = self.runner.launch(plan)
        except EngineError:
            raise
        except Exception as error:
            handle = error
        self._launched.append(_Launched(plan, handle, frozenset(unknown)))
        return None

    def _moved(self, event: Event) -> None:
        """Follow the events of tiers."""
        if self.restores is None:
            return
        match event:
            case Loaded(ticket, failed):
                self._finish_steps()
                self.restores.loaded(ticket, failed=bool(failed))
            case TierChanged(_, removed):
                self.restores.forget(removed)
            case Reset(keeps_tiers):
                self.restores.clear(keeps_units=keeps_tiers)
            case _:
                pass

    def drain(self) -> None:
        """Collect the steps in flight."""
        while self._launched:
            self._collected(self._launched.popleft())

    def _finish_steps(self) -> None:
        """Collect the steps in flight before a copy of pages that is waited for.

        The copy follows them on the device, and one may wait for a mask that follows from the
        tokens of the step before. Their results are compared when the recording has them.
        """
        for launched in self._launched:
            self._collected(launched)

    def _collected(self, launched: _Launched) -> StepResult | Exception:
        if isinstance(launched.handle, Exception):
            return launched.handle
        if launched.result is None:
            try:
                launched.result = self.runner.collect(launched.handle)
            except EngineError:
                raise
            except Exception as error:
                launched.result = error
        return launched.result

    def _runnable(self, plan: StepPlan) -> StepPlan:
        """The plan with constraints, and with the slots that were in use before the recording."""
        admissions = tuple(
            replace(new, request=replace(new.request, constraint=self.compiled(new.request)))
            if new.request.constraint is RECORDED
            else new
            for new in plan.admissions
        )
        taken = {new.slot for new in admissions}
        begun, self._begun = self._begun, ()
        earlier = (one for one in begun if one.slot not in taken)
        return replace(plan, admissions=(*earlier, *admissions))

    def _compared(
        self,
        call: Call,
        launched: _Launched,
        recorded: StepResult,
        own: StepResult,
        state: SchedulerState,
    ) -> str | None:
        """A sentence on the first row that differs."""
        results = {(row.request_id, row.epoch): row for row in own.rows}
        rows = {(row.request_id, row.epoch): row for row in launched.plan.rows}
        texts: list[str] = []
        for index, was in enumerate(recorded.rows):
            key = was.request_id, was.epoch
            if key in launched.unknown:
                self.counts.unknown += 1
                continue
            self.counts.compared += 1
            now = results[key]
            digest = call.outputs.get((recorded.step_id, index))
            text = _row_difference(rows[key], was, now)
            has_output = digest is not None and not was.error
            if not text and has_output and digest != output_digest(now.output):
                text = "has other logprobs, activations or another vector than here"
            if text:
                self.found = self.found or Found(rows[key], state)
                texts.append(f"request {was.request_id} {text}")
        if not texts:
            return None
        count = f"{len(texts)} of {len(recorded.rows)} rows differ (bucket "
        return f"{texts[0]}; {count}{launched.plan.bucket.name})"


def _row_difference(row: ScheduledSeq, was: RowResult, now: RowResult) -> str:
    """How the result of a row differs from the recorded one; empty if it does not."""
    if was.error or now.error:
        if bool(was.error) == bool(now.error):
            return ""
        where = "in the recording" if was.error else "here"
        return f"failed {where} alone ({was.error or now.error})"
    position = row.num_computed_tokens + row.num_scheduled_tokens
    if was.token_ids == now.token_ids:
        same = was.digest == now.digest
        return "" if same else f"drew its token at position {position} from other values"
    return (
        f"drew {_words(was.token_ids)} at position {position} in the recording and "
        f"{_words(now.token_ids)} here"
    )


def _words(token_ids: Sequence[int]) -> str:
    return " ".join(["token", *map(str, token_ids)]) if token_ids else "no token"


def _unconstrained(request: Request) -> Request:
    """A request whose draws need no masks: its rows are not compared."""
    tokens = request.max_tokens
    return replace(request, constraint=None, sampling=SamplingParams(max_tokens=tokens))
