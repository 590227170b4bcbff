"""Snapshots of layer state: where prefills are cut for them, which are kept, which are used."""

from __future__ import annotations

import pytest

from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import Abort, Arrive, StepDone, StepFailed, StepPlan
from jaxinfer.sched.snapshots import SnapshotWriter, new_snapshots
from kit.drive import Drive, make_limits, make_request
from kit.fake_executor import expected_tokens

PROMPT = tuple(range(1, 23))  # 5 full pages and 2 tokens


def drive(**changes: object) -> Drive:
    """Of a model with state for each sequence."""
    return Drive(make_limits(**({"num_snapshots": 4, "max_num_batched_tokens": 64} | changes)))


def chunks(plans: list[StepPlan], request_id: str) -> list[tuple[int, int, bool]]:
    """(start, end, whether a snapshot is taken) of the prefill rows of a request."""
    return [
        (
            row.num_computed_tokens,
            row.num_computed_tokens + row.num_scheduled_tokens,
            row.snapshot is not None,
        )
        for plan in plans
        for row in plan.prefills
        if row.request_id == request_id
    ]


def restored(plans: list[StepPlan], request_id: str) -> list[int | None]:
    """The snapshot of each admission of a request."""
    found = [one for plan in plans for one in plan.admissions]
    return [one.snapshot for one in found if one.request.request_id == request_id]


def answered(one: Drive, *prompts: tuple[int, ...]) -> None:
    """Prompts, each after the one before has ended."""
    for prompt in prompts:
        name = f"r{len(one.tokens())}"
        one.arrive(make_request(name, prompt, arrival=len(one.tokens()), max_tokens=3))
        one.finish()


def test_a_prompt_is_cut_at_its_last_border() -> None:
    """Which is not its end: one token is left to draw from."""
    one = drive()
    answered(one, PROMPT, PROMPT[:20], PROMPT[:4])
    assert chunks(one.plans, "r0") == [(0, 20, True), (20, 22, False)]
    assert chunks(one.plans, "r1")[-1] == (16, 20, False)
    assert chunks(one.plans, "r2") == [(0, 4, False)]


def test_the_same_prompt_starts_from_there() -> None:
    one = drive()
    answered(one, PROMPT, PROMPT, (*PROMPT[:20], 49, 48))
    assert chunks(one.plans, "r1") == chunks(one.plans, "r2") == [(20, 22, False)]
    assert restored(one.plans, "r0") == [None]
    assert restored(one.plans, "r1") == restored(one.plans, "r2") != [None]
    assert one.endings()["r1"].num_cached_tokens == one.endings()["r2"].num_cached_tokens == 20


def test_a_beginning_that_two_share_is_a_border_for_the_second() -> None:
    """The third starts there."""
    one = drive()
    others = [(*PROMPT[:13], *(first + i for i in range(9))) for first in (30, 40)]
    answered(one, PROMPT, *others)
    assert chunks(one.plans, "r1") == [(0, 12, True), (12, 20, True), (20, 22, False)]
    assert chunks(one.plans, "r2") == [(12, 20, True), (20, 22, False)]
    assert [one.endings()[name].num_cached_tokens for name in ("r0", "r1", "r2")] == [0, 0, 12]


def test_chunks_meet_borders() -> None:
    one = drive(max_num_batched_tokens=7)
    answered(one, PROMPT)
    assert chunks(one.plans, "r0") == [
        (0, 7, False),
        (7, 14, False),
        (14, 20, True),
        (20, 22, False),
    ]


def test_without_snapshots_no_prefill_is_cut() -> None:
    one = drive(num_snapshots=0)
    answered(one, PROMPT, PROMPT)
    assert chunks(one.plans, "r0") == [(0, 22, False)]
    assert chunks(one.plans, "r1") == [(20, 22, False)]


def test_the_least_recently_used_goes_first() -> None:
    prompts = [(first, *PROMPT) for first in (40, 41, 42)]
    one = drive(num_snapshots=2, num_pages=200)
    a, b, c = prompts
    answered(one, a, b, a, c, a, b)
    cached = [one.endings()[f"r{i}"].num_cached_tokens for i in range(6)]
    assert cached == [0, 0, 20, 0, 20, 0]


def test_what_lost_its_page_goes_first() -> None:
    writer = SnapshotWriter(new_snapshots(2))
    for row, name in ((writer.take(bool), b"a"), (writer.take(bool), b"b")):
        assert row is not None
        writer.release([row])
        writer.register(row, name)
    used = writer.use(b"b")
    assert writer.take(lambda name: name == b"a") == used
    assert writer.last_within([b"a", b"b"]) == 1


def test_a_name_that_is_taken_stays() -> None:
    """Two compute the same prompt side by side."""
    one = drive()
    one.arrive(*(make_request(name, PROMPT, arrival=i) for i, name in enumerate("ab")))
    one.finish()
    assert chunks(one.plans, "a") == chunks(one.plans, "b") == [(0, 20, True), (20, 22, False)]
    assert len(one.state.snapshots.by_hash) == 1 and len(one.state.snapshots.free) == 3


def test_no_row_left() -> None:
    """All are pending: the prefill goes on without."""
    one = drive(num_snapshots=1)
    one.arrive(*(make_request(name, PROMPT, arrival=i) for i, name in enumerate("ab")))
    one.finish()
    assert [chunks(one.plans, name)[0] for name in "ab"] == [(0, 20, True), (0, 20, False)]


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_what_was_not_computed_has_no_name(how: str) -> None:
    one = drive()
    one.call(Arrive(make_request("r", PROMPT)))
    assert len(one.state.snapshots.free) == 3
    result = one.flying.pop(0)
    if how == "aborted":
        one.call(Abort("r"))
        one.call(StepDone(result))
    else:
        one.call(StepFailed(result.step_id, "the device is on fire"))
    assert len(one.state.snapshots.free) == 4 and not one.state.snapshots.by_hash
    reason = FinishReason.ABORT if how == "aborted" else FinishReason.ERROR
    assert one.endings()["r"].finish_reason is reason


def test_a_preempted_sequence_starts_from_its_snapshot() -> None:
    one = drive(num_pages=17, max_num_seqs=2)
    requests = [
        make_request(name, (i, *PROMPT), arrival=i, max_tokens=most)
        for i, (name, most) in enumerate((("a", 16), ("b", 30)))
    ]
    one.arrive(*requests)
    one.finish()
    assert one.state.num_preemptions
    first, *again = restored(one.plans, "b")
    assert first is None and again and None not in again
    assert one.tokens() == {r.request_id: expected_tokens(r, 64) for r in requests}
