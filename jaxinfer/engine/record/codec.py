"""Records as bytes: states of the scheduler, its events, and the plans that it made of them.

Reading one never runs code, so that a recording from elsewhere is safe: all is msgpack, and each
value is built here. Of a constraint it is only kept that there was one, and of a row's output its
kinds and a digest: the scheduler looks at no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from immutables import Map
from msgspec.structs import replace

from jaxinfer.core.errors import RecordingError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.step import (
    NO_OUTPUT,
    Abort,
    Arrive,
    Bucket,
    BucketsLoaded,
    Event,
    Hold,
    Reset,
    RowOutput,
    RowResult,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
)
from jaxinfer.core.tiers import NO_ORDERS, Loaded, Saved, TierChanged, TierOrders
from jaxinfer.engine.record.states import RECORDED, request_of, state_of, tupled
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState
from jaxinfer.sched.state import Sequence as SchedSequence

OF_TOKENS, POOLED = 1, 2  # the kinds of a row's output
_STATE, _CALL, _NOTE = "state", "call", "note"  # the kinds of records after the header

_row_fields = attrgetter("slot", "epoch", "num_computed_tokens", "num_scheduled_tokens")
_result_fields = attrgetter("request_id", "epoch", "token_ids", "digest")
_pool_fields = attrgetter("fresh_head", "cached_head", "num_cached", "num_free")


class OutputDigest(msgspec.Struct, frozen=True):
    """In place of a row's output: its kinds, and a digest of its values."""

    kinds: int
    digest: bytes


class Summary(NamedTuple):
    """The decisions of a call of the scheduler, so that another run can be compared with it."""

    step_id: int = -1  # -1: no step was planned
    bucket: str = ""
    admissions: tuple[tuple[int, int, int], ...] = ()  # slot, epoch, number of tokens
    # slot, epoch, tokens computed before and in the step
    decodes: tuple[tuple[int, int, int, int], ...] = ()
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    pages: tuple[int, ...] = ()  # of the prefill rows, in order: first and last of each group
    # units that are saved, and of each load its ticket, its units and their first and last place;
    # tickets of loads that are dropped
    orders: tuple[Any, ...] = ()
    # after the call: running, waiting, free slots, preemptions, and of each pool its heads, cached
    # and free pages
    counts: tuple[int, ...] = ()


class Call(NamedTuple):
    """One call of the scheduler. ``outputs``: digests, by step and index of the row."""

    number: int
    events: tuple[Event, ...]
    summary: Summary | None  # None: the call raised
    outputs: dict[tuple[int, int], OutputDigest]


class Checkpoint(NamedTuple):
    """The state before call ``number``."""

    number: int
    state: SchedulerState


class Note(NamedTuple):
    """An event of the engine before call ``number``, in which the scheduler has no part."""

    number: int
    kind: str  # "weights"
    text: str  # the reference that new weights came from; empty: they were given as a tree


type Record = Call | Checkpoint | Note


def summary_of(output: ScheduleOutput, after: SchedulerState) -> Summary:
    """The summary of a call that returned this output and state."""
    plan, orders = output.step, _orders(output.orders)
    counts = [
        len(after.running),
        len(after.waiting),
        len(after.free_slots),
        after.num_preemptions,
    ]
    for pool in after.pools:
        counts += _pool_fields(pool)
    if plan is None:
        return Summary(orders=orders, counts=tuple(counts))
    pages: list[int] = []
    for row in plan.prefills:
        for own in row.pages:
            pages += (own.first, own.ids[0], own.ids[-1]) if len(own.ids) else (own.first, 0, 0)
    return Summary(
        plan.step_id,
        plan.bucket.name,
        tuple([(new.slot, new.epoch, len(new.token_ids)) for new in plan.admissions]),
        tuple([_row_fields(row) for row in plan.decodes]),
        tuple([_row_fields(row) for row in plan.prefills]),
        tuple(pages),
        orders,
        tuple(counts),
    )


def _orders(orders: TierOrders) -> tuple[Any, ...]:
    if orders == NO_ORDERS:
        return ()
    loads = tuple(
        (load.ticket, len(load.units), load.units[0].place, load.units[-1].place)
        for load in orders.loads
    )
    return tuple([(unit.place, unit.key) for unit in orders.saves]), loads, orders.dropped


# Encoding


def encode_state(number: int, state: SchedulerState) -> bytes:
    """The record of the state before call ``number``."""
    of_seqs = [tuple(_without_constraint(seq) for seq in own) for own in _queues(state)]
    plans = tuple(_plan_without_constraints(plan) for plan in state.in_flight)
    # either map of a pool follows from the other
    pools = tuple(replace(pool, page_by_hash=Map()) for pool in state.pools)
    running, waiting = of_seqs
    state = replace(state, running=running, waiting=waiting, in_flight=plans, pools=pools)
    return _ENCODER.encode((_STATE, number, state))


def encode_call(number: int, events: Iterable[Event], summary: Summary | None) -> bytes:
    """The record of a call."""
    return _ENCODER.encode((_CALL, number, [_event(event) for event in events], summary))


def encode_note(number: int, kind: str, text: str) -> bytes:
    """The record of a ``Note``."""
    return _ENCODER.encode((_NOTE, number, kind, text))


def output_digest(output: RowOutput) -> OutputDigest:
    """The kinds and the digest of a row's output."""
    kinds = OF_TOKENS * output.is_of_tokens + POOLED * (output.pooled is not None)
    hasher = blake2b(_ENCODER.encode((output.logprobs, output.prompt_logprobs)), digest_size=8)
    if output.pooled is not None:
        hasher.update(output.pooled.tobytes())
    hasher.update(output.taps)
    return OutputDigest(kinds, hasher.digest())


def _queues(state: SchedulerState) -> tuple[tuple[SchedSequence, ...], ...]:
    return state.running, state.waiting


def _event(event: Event) -> tuple[Any, ...]:
    match event:
        case Arrive(request):
            return "arrive", _request(request)
        case Abort(request_id, reason):
            return "abort", request_id, reason
        case StepDone(result):
            others = {
                i: (*msgspec.structs.astuple(output_digest(row.output)), row.error)
                + (row.is_request_error,)
                for i, row in enumerate(result.rows)
                if row.output is not NO_OUTPUT or row.error
            }
            return "done", result.step_id, [_result_fields(row) for row in result.rows], others
        case StepFailed(step_id, error):
            return "failed", step_id, error
        case BucketsLoaded(buckets):
            return "loaded", buckets
        case Reset(keeps_tiers):
            return "reset", keeps_tiers
        case Hold():
            return ("hold",)
        case TierChanged(added, removed):
            return "tiers", added, removed
        case Saved(count):
            return "saved", count
        case Loaded(ticket, failed):
            return "restored", ticket, failed


def _request(request: Request) -> Request:
    return request if request.constraint is None else replace(request, constraint=RECORDED)


def _without_constraint(seq: SchedSequence) -> SchedSequence:
    return replace(seq, request=_request(seq.request))


def _plan_without_constraints(plan: StepPlan) -> StepPlan:
    admissions = tuple(replace(one, request=_request(one.request)) for one in plan.admissions)
    return replace(plan, admissions=admissions)


def _hook(value: Any) -> Any:
    """A form in msgpack: int32 values as bytes, little endian."""
    if isinstance(value, IntLog):
        return value.array().tobytes()
    if isinstance(value, np.ndarray):
        return value.astype("<i4").tobytes()
    if isinstance(value, Map):
        return dict(cast("Map[Any, Any]", value))
    raise NotImplementedError(f"a recording has no form for {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_hook)


# Decoding


def decode(body: memoryview, limits: Limits) -> Record:
    """The record of a body; raises ``RecordingError`` if it is none."""
    try:
        kind, number, *values = msgspec.msgpack.decode(body, strict=False)
        match kind:
            case "state":
                return Checkpoint(number, state_of(values[0], limits))
            case "call":
                return _call_of(number, *values)
            case "note":
                return Note(number, *values)
            case _:
                raise ValueError(f"no kind {kind!r}")
    except RecordingError:
        raise
    except Exception as error:  # whatever a wrong value leads to: it comes from a file
        raise RecordingError(
            f"a record of the recording cannot be read ({type(error).__name__}: {error}); replay "
            "it with the version of jaxinfer that wrote it"
        ) from error


def _call_of(number: int, events: list[Any], summary: list[Any] | None) -> Call:
    outputs: dict[tuple[int, int], OutputDigest] = {}
    known = tuple(_event_of(event, outputs) for event in events)
    return Call(number, known, None if summary is None else _summary(summary), outputs)


def _summary(values: list[Any]) -> Summary:
    step_id, bucket, *lists = values
    return Summary(step_id, bucket, *map(tupled, lists))


def _event_of(event: list[Any], outputs: dict[tuple[int, int], OutputDigest]) -> Event:
    kind, *values = event
    match kind:
        case "arrive":
            return Arrive(request_of(values[0]))
        case "abort":
            return Abort(values[0], FinishReason(values[1]))
        case "done":
            step_id, rows, others = values
            return StepDone(StepResult(step_id, tuple(_results(step_id, rows, others, outputs))))
        case "failed":
            return StepFailed(*values)
        case "loaded":
            return BucketsLoaded(msgspec.convert(values[0], tuple[Bucket, ...]))
        case "reset":
            return Reset(*values)
        case "tiers":
            return TierChanged(*map(tuple, values))
        case "saved":
            return Saved(*values)
        case "restored":
            return Loaded(values[0], tuple(values[1]))
        case "hold":
            return Hold()
        case _:
            raise ValueError(f"no event {kind!r}")


def _results(
    step_id: int,
    rows: list[Any],
    others: dict[int, Any],
    outputs: dict[tuple[int, int], OutputDigest],
) -> Iterable[RowResult]:
    for index, (request_id, epoch, token_ids, own) in enumerate(rows):
        output, error, is_request_error = NO_OUTPUT, "", False
        if (other := others.get(index)) is not None:
            kinds, digest, error, is_request_error = other
            outputs[step_id, index] = OutputDigest(kinds, digest)
            if kinds:
                taps = memoryview(b"\0") if kinds & OF_TOKENS else memoryview(b"")
                pooled = np.zeros(0, np.float32) if kinds & POOLED else None
                output = RowOutput(pooled=pooled, taps=taps)
        drawn = tuple(token_ids)
        yield RowResult(request_id, epoch, drawn, output, error, is_request_error, own)
