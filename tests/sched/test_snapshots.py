"""Snapshots of layer state: the splits of prefills, eviction and reuse."""

from __future__ import annotations

import pytest

from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import Abort, Arrive, StepDone, StepFailed, StepPlan
from jaxinfer.sched.snapshots import SnapshotPool
from kit.drive import Drive, make_limits, make_request
from kit.fake_executor import expected_tokens

PROMPT = tuple(range(1, 23))  # 5 full pages and 2 tokens


def drive(**changes: object) -> Drive:
    """A drive for a model with state for each sequence."""
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
    admissions = [admission for plan in plans for admission in plan.admissions]
    return [a.snapshot for a in admissions if a.request.request_id == request_id]


def run_each(one: Drive, *prompts: tuple[int, ...]) -> None:
    """Run the prompts one at a time."""
    for prompt in prompts:
        name = f"r{len(one.tokens())}"
        one.arrive(make_request(name, prompt, arrival=len(one.tokens()), max_tokens=3))
        one.finish()


def test_a_prompt_is_split_at_its_last_border() -> None:
    """The prompt's end is not a border: at least one token must be computed to draw the next."""
    one = drive()
    run_each(one, PROMPT, PROMPT[:20], PROMPT[:4])
    assert chunks(one.plans, "r0") == [(0, 20, True), (20, 22, False)]
    assert chunks(one.plans, "r1")[-1] == (16, 20, False)
    assert chunks(one.plans, "r2") == [(0, 4, False)]


def test_the_same_prompt_starts_from_the_snapshot() -> None:
    one = drive()
    run_each(one, PROMPT, PROMPT, (*PROMPT[:20], 49, 48))
    assert chunks(one.plans, "r1") == chunks(one.plans, "r2") == [(20, 22, False)]
    assert restored(one.plans, "r0") == [None]
    assert restored(one.plans, "r1") == restored(one.plans, "r2") != [None]
    assert one.endings()["r1"].num_cached_tokens == one.endings()["r2"].num_cached_tokens == 20


def test_the_end_of_a_shared_prefix_is_a_border_of_the_second_prompt() -> None:
    """A third prompt with the prefix starts from its snapshot."""
    one = drive()
    others = [(*PROMPT[:13], *(first + i for i in range(9))) for first in (30, 40)]
    run_each(one, PROMPT, *others)
    assert chunks(one.plans, "r1") == [(0, 12, True), (12, 20, True), (20, 22, False)]
    assert chunks(one.plans, "r2") == [(12, 20, True), (20, 22, False)]
    assert [one.endings()[name].num_cached_tokens for name in ("r0", "r1", "r2")] == [0, 0, 12]


def test_chunks_end_at_borders() -> None:
    one = drive(max_num_batched_tokens=7)
    run_each(one, PROMPT)
    assert chunks(one.plans, "r0") == [
        (0, 7, False),
        (7, 14, False),
        (14, 20, True),
        (20, 22, False),
    ]


def test_without_snapshots_no_prefill_is_split() -> None:
    one = drive(num_snapshots=0)
    run_each(one, PROMPT, PROMPT)
    assert chunks(one.plans, "r0") == [(0, 22, False)]
    assert chunks(one.plans, "r1") == [(20, 22, False)]


def test_the_least_recently_used_row_is_taken_first() -> None:
    prompts = [(first, *PROMPT) for first in (40, 41, 42)]
    one = drive(num_snapshots=2, num_pages=200)
    a, b, c = prompts
    run_each(one, a, b, a, c, a, b)
    cached = [one.endings()[f"r{i}"].num_cached_tokens for i in range(6)]
    assert cached == [0, 0, 20, 0, 20, 0]


def test_a_row_whose_page_was_evicted_is_taken_first() -> None:
    pool = SnapshotPool((0, 1))
    for page_hash in (b"a", b"b"):
        row, pool = pool.take(bool)
        assert row is not None
        pool = pool.release([row]).register(row, page_hash)
    used, pool = pool.use(b"b")
    taken, pool = pool.take(lambda page_hash: page_hash == b"a")
    assert taken == used
    assert pool.last_within([b"a", b"b"]) == 1


def test_a_hash_stays_with_its_first_row() -> None:
    """Two sequences compute the same prompt in the same step."""
    one = drive()
    one.arrive(*(make_request(name, PROMPT, arrival=i) for i, name in enumerate("ab")))
    one.finish()
    assert chunks(one.plans, "a") == chunks(one.plans, "b") == [(0, 20, True), (20, 22, False)]
    assert len(one.state.snapshots.by_hash) == 1 and len(one.state.snapshots.free) == 3


def test_no_free_row() -> None:
    """If all rows are pending, a prefill takes no snapshot."""
    one = drive(num_snapshots=1)
    one.arrive(*(make_request(name, PROMPT, arrival=i) for i, name in enumerate("ab")))
    one.finish()
    assert [chunks(one.plans, name)[0] for name in "ab"] == [(0, 20, True), (0, 20, False)]


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_the_snapshot_of_an_aborted_or_failed_prefill_is_freed(how: str) -> None:
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
