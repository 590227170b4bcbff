"""``check`` detects each kind of damage; otherwise the property tests prove nothing."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from immutables import Map

from jaxinfer.core.step import Pages
from jaxinfer.sched.schedule import SchedulerState
from kit.drive import Drive, make_limits, make_request
from kit.invariants import check

replace = msgspec.structs.replace


@pytest.fixture
def state() -> SchedulerState:
    """Two running sequences that share a page, one waiting, some cached pages, a step in flight."""
    drive = Drive(make_limits(max_num_seqs=2), depth=1)
    drive.arrive(make_request("old", [5] * 9, max_tokens=1))
    drive.tick()
    drive.arrive(make_request("a", [1] * 9, arrival=1, max_tokens=30))
    drive.tick()
    drive.arrive(*(make_request(n, [1] * 9, arrival=i) for i, n in enumerate("bc", 2)))
    check(drive.state)
    assert (len(drive.state.running), len(drive.state.waiting)) == (2, 1)
    assert drive.state.pools[0].num_cached and drive.state.pools[0].num_sharers.any()
    return drive.state


def first(state: SchedulerState, **changes: object) -> SchedulerState:
    return replace(state, running=(replace(state.running[0], **changes), *state.running[1:]))


def second(state: SchedulerState, **changes: object) -> SchedulerState:
    one, two, *others = state.running
    return replace(state, running=(one, replace(two, **changes), *others))


def pool(state: SchedulerState, **changes: object) -> SchedulerState:
    return replace(state, pools=(replace(state.pools[0], **changes),))


def written(array: np.ndarray, index: int, value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    copy.flags.writeable = False
    return copy


def more_pages(state: SchedulerState, *page_ids: int) -> tuple[Pages, ...]:
    return (Pages(state.running[0].pages[0].ids.extend(page_ids)),)


DAMAGES: tuple[tuple[Callable[[SchedulerState], SchedulerState], str], ...] = (
    (lambda s: pool(s, fresh_head=s.pools[0].fresh_head + 1), "not in exactly one of"),
    (lambda s: first(s, pages=more_pages(s, 40)), "not in exactly one of"),
    (lambda s: pool(s, num_cached=0), "num_cached is 0"),
    (lambda s: replace(s, num_live_pages=(0,)), "pages of each group are live"),
    (lambda s: pool(s, num_sharers=s.pools[0].num_sharers * 0), "has 2 owners"),
    (lambda s: pool(s, stamps=s.pools[0].stamps + 99), "not in exactly one of"),
    (lambda s: pool(s, stamps=written(s.pools[0].stamps, 40, 99)), "the stamp 99 of page 40"),
    (lambda s: pool(s, page_by_hash=s.pools[0].page_by_hash.set(b"?", 1)), "not inverse"),
    (lambda s: pool(s, stamps=s.pools[0].stamps.copy()), "can be written"),
    (lambda s: replace(s, running=s.running[::-1]), "running is not in order"),
    (lambda s: replace(s, waiting=()), "not exactly the unfinished"),
    (lambda s: replace(s, free_slots=(0,)), "slots are lost or given twice"),
    (lambda s: replace(s, next_step_id=9), "steps in flight are"),
    (lambda s: first(s, num_in_flight_tokens=3), "tokens in flight"),
    (lambda s: first(s, num_computed_tokens=9), "decodes at 9"),
    (lambda s: first(s, max_num_tokens=9), "of at most 9"),
    (lambda s: first(s, num_registered_pages=3), "has registered 3 pages"),
    (
        lambda s: replace(s, waiting=(replace(s.waiting[0], slot=1),)),
        "waiting request 'c' owns slot 1",
    ),
    (
        lambda s: pool(s, page_by_hash=Map(), hash_by_page=Map()),
        "shared by 2 sequences but not hashed",
    ),
    (lambda s: first(s, pages=more_pages(s, s.running[0].pages[0].ids[0])), "lists a page twice"),
)


@pytest.fixture
def with_snapshots() -> SchedulerState:
    """A registered snapshot, one that a step in flight saves, and a prompt that will save one."""
    drive = Drive(make_limits(num_snapshots=3), depth=1)
    drive.arrive(make_request("old", [5] * 9, max_tokens=1))
    drive.finish()
    drive.arrive(make_request("a", [1] * 11, arrival=1), make_request("b", [2] * 19, arrival=2))
    check(drive.state)
    assert [seq.borders for seq in drive.state.running] == [(), (16,)]
    assert len(drive.state.snapshots.free) == len(drive.state.snapshots.by_hash) == 1
    return drive.state


def snapshots(state: SchedulerState, **changes: object) -> SchedulerState:
    return replace(state, snapshots=replace(state.snapshots, **changes))


SNAPSHOT_DAMAGES: tuple[tuple[Callable[[SchedulerState], SchedulerState], str], ...] = (
    (lambda s: snapshots(s, free=()), "not once in free"),
    (lambda s: snapshots(s, free=(*s.snapshots.free, 0)), "not once in free"),
    (lambda s: snapshots(s, by_hash=Map()), "not once in free"),
    (lambda s: replace(s, in_flight=(), next_step_id=0), "not once in free"),
    (lambda s: snapshots(s, clock=0), "the clock is 0"),
    (lambda s: second(s, borders=(4,)), "is to be saved at 4, with 5 computed"),
    (lambda s: second(s, borders=(9,)), "is no page border"),
    (lambda s: second(s, saving=16), "holds pages for a snapshot at 16, and steps save at set"),
)


@pytest.mark.parametrize(("damage", "message"), SNAPSHOT_DAMAGES)
def test_damage_of_snapshots_is_detected(
    with_snapshots: SchedulerState,
    damage: Callable[[SchedulerState], SchedulerState],
    message: str,
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(damage(with_snapshots))


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_damage_is_detected(
    state: SchedulerState, damage: Callable[[SchedulerState], SchedulerState], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(damage(state))
