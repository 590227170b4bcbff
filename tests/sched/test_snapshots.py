"""Snapshots of layer state: what prefills save, on which grid, eviction and reuse."""

from __future__ import annotations

from math import lcm

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import (
    Abort,
    Arrive,
    Bucket,
    Hold,
    PageGroup,
    StepDone,
    StepFailed,
    StepPlan,
)
from jaxinfer.sched.snapshots import SnapshotPool
from kit.drive import Drive, make_limits, make_request
from kit.fake_executor import expected_tokens

PROMPT = tuple(range(1, 23))  # 5 full pages and 2 tokens


def drive(**changes: object) -> Drive:
    """A drive for a model with state for each sequence."""
    return Drive(make_limits(**({"num_snapshots": 4, "max_num_batched_tokens": 64} | changes)))


def chunks(plans: list[StepPlan], request_id: str) -> list[tuple[int, ...]]:
    """(start, end, the positions that are saved ...) of the prefill rows of a request."""
    return [
        (
            row.num_computed_tokens,
            row.num_computed_tokens + row.num_scheduled_tokens,
            *(row.num_computed_tokens + count for count, _ in row.saves),
        )
        for plan in plans
        for row in plan.prefills
        if row.request_id == request_id
    ]


def restored(plans: list[StepPlan], request_id: str) -> list[int | None]:
    """The snapshot that the first row of each admission of a request starts from."""
    return [
        row.reads
        for plan in plans
        for admission in plan.admissions
        for row in plan.prefills
        if admission.request.request_id == row.request_id == request_id
    ]


def run_each(one: Drive, *prompts: tuple[int, ...]) -> None:
    """Run the prompts one at a time."""
    for prompt in prompts:
        name = f"r{len(one.tokens())}"
        one.arrive(make_request(name, prompt, arrival=len(one.tokens()), max_tokens=3))
        one.finish()


def test_a_chunk_saves_the_last_border_that_it_passes() -> None:
    """The prompt's end is not a border: at least one token must be computed to draw the next."""
    one = drive()
    run_each(one, PROMPT, PROMPT[:20], PROMPT[:4])
    assert chunks(one.plans, "r0") == [(0, 22, 20)]
    assert chunks(one.plans, "r1") == [(0, 20, 16)]
    assert chunks(one.plans, "r2") == [(0, 4)]


def test_the_same_prompt_starts_from_the_snapshot() -> None:
    one = drive()
    run_each(one, PROMPT, PROMPT, (*PROMPT[:20], 49, 48))
    assert chunks(one.plans, "r1") == chunks(one.plans, "r2") == [(20, 22)]
    assert restored(one.plans, "r0") == [None]
    assert restored(one.plans, "r1") == restored(one.plans, "r2") != [None]
    assert one.endings()["r1"].num_cached_tokens == one.endings()["r2"].num_cached_tokens == 20


def test_the_end_of_a_shared_prefix_is_a_border_of_the_second_prompt() -> None:
    """A third prompt with the prefix starts from its snapshot."""
    one = drive()
    others = [(*PROMPT[:13], *(first + i for i in range(9))) for first in (30, 40)]
    run_each(one, PROMPT, *others)
    assert chunks(one.plans, "r1") == [(0, 22, 12, 20)]
    assert chunks(one.plans, "r2") == [(12, 22, 20)]
    assert [one.endings()[name].num_cached_tokens for name in ("r0", "r1", "r2")] == [0, 0, 12]


@pytest.mark.parametrize(
    ("align", "expected"),
    [
        (1, [(0, 7), (7, 14), (14, 21, 20), (21, 22)]),
        (2, [(0, 6), (6, 12), (12, 18), (18, 22, 20)]),
        (4, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 22, 20)]),
        (6, [(0, 6), (6, 12, 12), (12, 18), (18, 22)]),  # pages and states both end at 12
    ],
)
def test_only_the_chunk_that_ends_a_prompt_is_ragged(align: int, expected: list[object]) -> None:
    one = drive(max_num_batched_tokens=7, align=align)
    run_each(one, PROMPT, PROMPT)
    assert chunks(one.plans, "r0") == expected
    assert one.endings()["r1"].num_cached_tokens == 20 // lcm(4, align) * lcm(4, align)


def test_a_budget_below_the_grid_gives_a_prompt_nothing() -> None:
    """Next to a prompt of 10 tokens, 6 of 16 are left: a short prompt is computed with them."""
    one = drive(max_num_batched_tokens=16, align=8)
    prompts = PROMPT[:10], PROMPT[1:], PROMPT[2:8]
    for i, prompt in enumerate(prompts):
        one.call(Arrive(make_request(f"r{i}", prompt, arrival=i)), Hold())
    one.finish()
    assert [row.request_id for row in one.plans[0].prefills] == ["r0"]
    assert chunks(one.plans, "r1") == [(0, 16, 16), (16, 21)]
    # behind 5 tokens of ``r1``
    assert [row.request_id for row in one.plans[2].prefills] == ["r1", "r2"]


def test_a_prefix_makes_a_prompt_short_enough() -> None:
    """A prompt of 21 tokens reuses 16; the other 5 fit next to a prompt of 10."""
    one = drive(max_num_batched_tokens=16, align=8)
    run_each(one, PROMPT[1:])
    first = len(one.plans)
    one.call(Arrive(make_request("a", PROMPT[:10], arrival=1)), Hold())
    one.call(Arrive(make_request("b", PROMPT[1:], arrival=2)))
    one.finish()
    assert [row.request_id for row in one.plans[first].prefills] == ["a", "b"]


@pytest.mark.parametrize("chunk", [4, 8])
def test_limits_without_space_for_the_grid_are_refused(chunk: int) -> None:
    """Neither a step with prompts alone nor one in which rows decode may lack the space."""
    small = {"buckets": (Bucket(4), Bucket(0, 8, 4), Bucket(4, 4, 4, True))} if chunk == 8 else {}
    with pytest.raises(ConfigError, match="no bucket holds 3 decodes and 1 prefills of 8 tokens"):
        drive(max_num_batched_tokens=chunk, align=8, **small)


def test_without_snapshots_nothing_is_saved() -> None:
    one = drive(num_snapshots=0)
    run_each(one, PROMPT, PROMPT)
    assert chunks(one.plans, "r0") == [(0, 22)]
    assert chunks(one.plans, "r1") == [(20, 22)]


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
    assert chunks(one.plans, "a") == chunks(one.plans, "b") == [(0, 22, 20)]
    assert len(one.state.snapshots.by_hash) == 1 and len(one.state.snapshots.free) == 3


def test_no_free_row() -> None:
    """If all rows are pending, a prefill takes no snapshot."""
    one = drive(num_snapshots=1)
    one.arrive(*(make_request(name, PROMPT, arrival=i) for i, name in enumerate("ab")))
    one.finish()
    assert [chunks(one.plans, name)[0] for name in "ab"] == [(0, 22, 20), (0, 22)]


def test_a_step_does_not_overwrite_a_snapshot_that_it_restores() -> None:
    """It is the only one, and both the row that starts from it and another row need one."""
    one = drive(num_snapshots=1)
    run_each(one, PROMPT)
    first = len(one.plans)
    longer = make_request("a", (*PROMPT, 48, 47, 46), arrival=1)
    other = make_request("b", (49, *PROMPT), arrival=2)
    one.call(Arrive(longer), Hold())
    one.call(Arrive(other))
    (plan,) = one.plans[first:]
    assert [(row.reads, row.saves) for row in plan.prefills] == [(0, ()), (None, ())]
    one.finish()


def test_pages_before_a_snapshot_are_held_until_it_is_registered() -> None:
    """Decode rows are planned before that, whose window has passed them."""
    one = drive(groups=(PageGroup(5),), align=8)
    prompt = (*PROMPT, 48, 47, 46)[:23]
    run_each(one, prompt, prompt)
    assert chunks(one.plans, "r0") == [(0, 23, 16)]
    assert one.endings()["r1"].num_cached_tokens == 16


def test_limits_count_the_pages_that_are_held_for_a_snapshot() -> None:
    """Pages of the other group cover 16 tokens, so two chunks follow the border at 16."""
    groups = (PageGroup(None, 4), PageGroup(6, 1, 1))
    limits = make_limits(
        num_snapshots=4, max_num_batched_tokens=7, groups=groups, num_pages=(20, 20)
    )
    one = Drive(limits, depth=3)
    run_each(one, (*PROMPT, *PROMPT)[:32], (*PROMPT, *PROMPT)[:32])
    assert chunks(one.plans, "r0") == [(0, 7), (7, 14), (14, 21, 16), (21, 28), (28, 32)]
    assert one.endings()["r1"].num_cached_tokens == 16


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


def test_an_answer_keeps_its_newest_state() -> None:
    """The next turn of a chat goes on where the answer had its last border."""
    one = drive(max_num_seqs=2)
    first = make_request("first", PROMPT, max_tokens=21)
    one.arrive(first)
    one.finish()
    ends = [row.num_computed_tokens + 1 for plan in one.plans for row in plan.decodes if row.saves]
    assert ends == [24, 28, 32, 36, 40]
    known = one.state.snapshots.by_hash
    assert len(known) == 2, "one of the prompt, one of the answer"
    turn = (*PROMPT, *one.tokens()["first"], 7, 8, 9)
    one.arrive(make_request("second", turn, arrival=1, max_tokens=2))
    one.finish()
    assert one.endings()["second"].num_cached_tokens == 40


def test_an_answer_forgets_no_state_of_another_prompt() -> None:
    """A prompt that continues an answer saved the state at its border before; it stays."""
    one = drive(max_num_seqs=2)
    request = make_request("first", PROMPT, max_tokens=21)
    answer = expected_tokens(request, 64)
    one.arrive(make_request("turn", (*PROMPT, *answer)[:29], max_tokens=1))
    one.finish()
    (kept,) = one.state.snapshots.by_hash
    one.arrive(request)
    one.finish()
    assert kept in one.state.snapshots.by_hash


def test_answers_save_nothing_where_snapshots_are_few() -> None:
    one = drive(max_num_seqs=3)
    run_each(one, PROMPT)
    assert not any(row.saves for plan in one.plans for row in plan.decodes)


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
