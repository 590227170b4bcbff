"""States of the scheduler from their form in a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from immutables import Map
from msgspec.structs import replace

from jaxinfer.core.errors import RecordingError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request
from jaxinfer.core.step import Bucket, Pages, ScheduledSeq, SlotAdmission, StepPlan
from jaxinfer.core.tiers import CostModel, Load, SaveAhead, TierPolicy, TierUnit
from jaxinfer.sched.moves import Evicted
from jaxinfer.sched.pages import PagePool
from jaxinfer.sched.schedule import SchedulerState
from jaxinfer.sched.sequence import Restoring
from jaxinfer.sched.snapshots import Snapshot, SnapshotPool
from jaxinfer.sched.state import Sequence as SchedSequence


class Recorded(msgspec.Struct, frozen=True):
    """In place of a constraint: there was one."""

    def begin(self, drawn: Sequence[int]) -> Any:
        """The constraint itself is compiled again where a recording is checked on a device."""
        del drawn
        raise RecordingError("the recording has no constraint; compile it from the request")


RECORDED = Recorded()


def request_of(values: dict[str, Any]) -> Request:
    """A request; of its constraint it is known whether there was one."""
    prompt, constraint = values["prompt_token_ids"], values["constraint"]
    tokens = _ints(prompt) if isinstance(prompt, bytes) else tuple(prompt)
    given = {**values, "prompt_token_ids": (), "constraint": None}
    request = msgspec.convert(given, Request)
    return replace(
        request,
        prompt_token_ids=tokens,
        constraint=None if constraint is None else RECORDED,
    )


def _ints(data: bytes) -> IntLog:
    return IntLog(np.frombuffer(data, "<i4").astype(np.int32))


def _array(data: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    array = np.frombuffer(data, "<i4").astype(np.int32)
    array.flags.writeable = False
    return array


def _pages(values: dict[str, Any]) -> Pages:
    return Pages(_ints(values["ids"]), values["first"])


def _made[T](kind: Callable[..., T], values: dict[str, Any], **readers: Callable[[Any], Any]) -> T:
    """A struct of a map of its fields, some of which have a reader; lists become tuples."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        reader = readers.get(name)
        read[name] = reader(value) if reader and value is not None else tupled(value)
    return kind(**read)


def tupled(value: Any) -> Any:
    """The value with tuples in place of lists, at every depth."""
    return tuple(map(tupled, cast("list[Any]", value))) if isinstance(value, list) else value


def _each[T](reader: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    return lambda values: tuple(map(reader, values))


def _sequence(values: dict[str, Any]) -> SchedSequence:
    return _made(
        SchedSequence,
        values,
        request=request_of,
        token_ids=_ints,
        pages=_each(_pages),
        restoring=_restoring,
    )


def _restoring(values: dict[str, Any]) -> Restoring:
    return _made(Restoring, values, units=_each(_unit))


def _policy(values: dict[str, Any]) -> TierPolicy:
    def cost(own: dict[str, Any]) -> CostModel:
        return CostModel(**own)

    def ahead(own: dict[str, Any]) -> SaveAhead:
        return SaveAhead(**own)

    return _made(TierPolicy, values, cost=cost, ahead=ahead)


def _unit(values: dict[str, Any]) -> TierUnit:
    return _made(TierUnit, values)


def _evicted(values: list[Any]) -> Evicted:
    pool, unit = values
    return Evicted(pool, _unit(unit))


def _load(values: dict[str, Any]) -> Load:
    return _made(Load, values, units=_each(_unit))


def _row(values: dict[str, Any]) -> ScheduledSeq:
    return _made(ScheduledSeq, values, pages=_each(_pages), token_ids=_array, target_ids=_array)


def _admission(values: dict[str, Any]) -> SlotAdmission:
    return _made(SlotAdmission, values, request=request_of, token_ids=_ints)


def _plan(values: dict[str, Any]) -> StepPlan:
    return _made(
        StepPlan,
        values,
        bucket=lambda bucket: msgspec.convert(bucket, Bucket),
        admissions=_each(_admission),
        decodes=_each(_row),
        prefills=_each(_row),
    )


def _pool(values: dict[str, Any]) -> PagePool:
    by_page: dict[int, bytes] = values["hash_by_page"]
    by_hash = {key: page for page, key in by_page.items()}
    return _made(
        PagePool,
        {**values, "page_by_hash": by_hash},
        fresh=_ints,
        cached=_ints,
        num_sharers=_array,
        stamps=_array,
        page_by_hash=Map,
        hash_by_page=Map,
    )


def _snapshots(values: dict[str, Any]) -> SnapshotPool:
    return _made(
        SnapshotPool,
        values,
        by_hash=lambda known: Map({key: Snapshot(*value) for key, value in known.items()}),
    )


def state_of(values: dict[str, Any], limits: Limits) -> SchedulerState:
    """The state of a map of its fields; ``limits`` are in the header. Raises any exception for a
    wrong value.
    """
    return _made(
        SchedulerState,
        values,
        limits=lambda _: limits,
        buckets=_each(lambda bucket: msgspec.convert(bucket, Bucket)),
        running=_each(_sequence),
        waiting=_each(_sequence),
        orders=lambda known: Map({key: tuple(value) for key, value in known.items()}),
        pools=_each(_pool),
        snapshots=_snapshots,
        in_flight=_each(_plan),
        tiers=_policy,
        tier_keys=Map,
        evicted=_each(_evicted),
        held_loads=_each(_load),
    )
