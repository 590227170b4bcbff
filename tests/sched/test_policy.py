"""Choosing the rows of a step: order, budget, buckets, admission, preemption, prefix reuse."""

from typing import Any

import pytest

from jaxinfer.core.steering import Steering
from jaxinfer.core.step import Abort, Arrive, Bucket, BucketsLoaded, PageGroup, StepPlan
from jaxinfer.sched.schedule import initial_state, schedule
from kit.drive import POINT, Drive, make_limits, make_request
from kit.fake_executor import expected_tokens


def shape(plan: StepPlan | None) -> tuple[list[str], list[tuple[str, int]]]:
    """Decode rows by id; prefill rows by id and tokens."""
    assert plan is not None
    return (
        [row.request_id for row in plan.decodes],
        [(row.request_id, row.num_scheduled_tokens) for row in plan.prefills],
    )


def running(drive: Drive) -> list[str]:
    return [seq.request_id for seq in drive.state.running]


def waiting(drive: Drive) -> list[str]:
    return [seq.request_id for seq in drive.state.waiting]


def test_prefills_share_the_budget_and_decodes_are_in_the_same_steps() -> None:
    drive = Drive(make_limits(max_num_batched_tokens=16), depth=1)
    output = drive.arrive(
        make_request("a", [1] * 10), make_request("b", [2] * 10, arrival=1, max_tokens=30)
    )
    assert shape(output.step) == ([], [("a", 10), ("b", 6)])
    output = drive.arrive(make_request("c", [3] * 20, arrival=2))
    assert shape(output.step) == (["a"], [("b", 4), ("c", 12)])
    assert output.step is not None and output.step.bucket.name.startswith("d4p")
    assert shape(drive.tick().step) == (["a", "b"], [("c", 8)])


def test_a_chunk_next_to_decodes_fills_a_mixed_bucket() -> None:
    buckets = (Bucket(4), Bucket(0, 16, 4), Bucket(4, 4, 4, scores=True))
    drive = Drive(make_limits(max_num_batched_tokens=16, buckets=buckets), depth=1)
    output = drive.arrive(*(make_request(f"r{i}", [i] * 10, arrival=i) for i in range(3)))
    assert shape(output.step) == ([], [("r0", 10), ("r1", 6)])
    assert shape(drive.tick().step) == (["r0"], [("r1", 4)])
    assert shape(drive.tick().step) == (["r0", "r1"], [("r2", 4)])
    output = drive.tick(Abort("r0"), Abort("r1"))  # no decodes wait for the rest of the prompt
    assert shape(output.step) == ([], [("r2", 6)])


def test_a_batch_that_fits_is_prefilled_before_any_decode() -> None:
    drive = Drive(make_limits(max_num_batched_tokens=16, prefill_first=True), depth=1)
    output = drive.arrive(*(make_request(f"r{i}", [i] * 10, arrival=i) for i in range(3)))
    assert shape(output.step) == ([], [("r0", 10), ("r1", 6)])
    assert shape(drive.tick().step) == ([], [("r1", 4), ("r2", 10)])
    assert shape(drive.tick().step) == (["r0", "r1", "r2"], [])
    output = drive.arrive(make_request("late", [9] * 20, arrival=3))
    assert shape(output.step) == ([], [("late", 16)])
    assert shape(drive.tick().step) == ([], [("late", 4)])
    assert shape(drive.tick().step) == (["r0", "r1", "r2", "late"], [])


@pytest.mark.parametrize(
    "limits", ({"max_num_seqs": 2}, {"num_pages": 11}), ids=("too-few-slots", "too-few-pages")
)
def test_a_batch_that_does_not_fit_has_mixed_steps(limits: dict[str, int]) -> None:
    drives = [
        Drive(make_limits(max_num_batched_tokens=8, prefill_first=prefill_first, **limits))
        for prefill_first in (False, True)
    ]
    for drive in drives:
        drive.arrive(*(make_request(f"r{i}", [i] * 8, arrival=i) for i in range(3)))
        drive.finish()
    mixed, first = ([shape(plan) for plan in drive.plans] for drive in drives)
    assert first[:2] == mixed[:2] == [([], [("r0", 8)]), (["r0"], [("r1", 8)])]


def test_decodes_continue_while_the_watermark_blocks_the_head() -> None:
    limits = make_limits(
        num_pages=201, enable_prefix_caching=False, max_model_len=800, prefill_first=True
    )
    drive = Drive(limits, depth=1)
    drive.arrive(make_request("a", [1] * 13, max_tokens=3))
    output = drive.arrive(make_request("b", [2] * (4 * 196 - 1), arrival=1, max_tokens=1))
    assert (shape(output.step), waiting(drive)) == ((["a"], []), ["b"])
    drive.finish()
    assert drive.state.num_preemptions == 0


def test_lower_priority_number_is_first_and_no_request_overtakes_the_head() -> None:
    drive = Drive(make_limits(max_num_seqs=2, max_num_batched_tokens=8), depth=1)
    drive.arrive(*(make_request(f"r{i}", [1] * 8, arrival=i, max_tokens=40) for i in range(3)))
    assert (running(drive), waiting(drive)) == (["r0"], ["r1", "r2"])
    drive.arrive(make_request("vip", [2] * 8, arrival=3, priority=-1))
    assert running(drive) == ["vip", "r0"], "running is kept in order"
    drive.call(Abort("r0"))
    assert (running(drive), waiting(drive)) == (["vip", "r1"], ["r2"])


def test_a_long_head_is_not_overtaken_by_a_short_one() -> None:
    drive = Drive(make_limits(num_pages=17, enable_prefix_caching=False), depth=1)
    drive.arrive(make_request("a", [1] * 30, max_tokens=2))
    drive.arrive(make_request("long", [2] * 50, arrival=1), make_request("short", [3], arrival=2))
    assert waiting(drive) == ["long", "short"]
    drive.finish()
    assert [e.request_id for e in drive.events if e.finish_reason][0] == "a"


@pytest.mark.parametrize(("num_prompt", "admitted"), [(4 * 194, True), (4 * 195, False)])
def test_the_watermark_keeps_pages_for_the_running(num_prompt: int, admitted: bool) -> None:
    drive = Drive(make_limits(num_pages=201, enable_prefix_caching=False, max_model_len=800))
    drive.arrive(make_request("a", [1] * 15, max_tokens=700))
    assert drive.state.num_free_pages == 196
    drive.arrive(make_request("b", [2] * num_prompt, arrival=1, max_tokens=1))
    assert waiting(drive) == ([] if admitted else ["b"]), "2 of 200 pages stay free"


def test_without_running_sequences_the_whole_pool_is_available() -> None:
    drive = Drive(make_limits(num_pages=201, max_model_len=800))
    drive.arrive(make_request("a", [1] * 799))
    assert running(drive) == ["a"]


@pytest.mark.parametrize(
    ("decodes", "tokens", "prefills", "name"),
    [
        (1, 0, 0, "d1"),
        (3, 0, 0, "d4"),
        (0, 5, 1, "p8x2"),
        (0, 5, 3, "p16x4"),
        (2, 9, 1, "d4p16x4"),
        (1, 1, 1, "d4p16x4"),
    ],
)
def test_the_smallest_bucket_that_fits(decodes: int, tokens: int, prefills: int, name: str) -> None:
    table = (Bucket(4, 16, 4, scores=True), Bucket(0, 16, 4), Bucket(4), Bucket(0, 8, 2), Bucket(1))
    buckets = initial_state(make_limits(buckets=table)).buckets
    size = Bucket(decodes, tokens, prefills)
    assert next(bucket for bucket in buckets if bucket.holds(size)).name == name


def test_a_bucket_is_used_once_it_is_loaded() -> None:
    large, small = Bucket(4, 16, 4, scores=True), Bucket(1)
    limits = make_limits(buckets=(large, small))
    state = initial_state(limits, (large,))
    arrival = Arrive(make_request("a", [1] * 8, max_tokens=50))
    state, output = schedule(state, (arrival,))
    assert output.step is not None
    assert output.step.bucket == large
    state, output = schedule(state, ())
    assert output.step is not None
    assert output.step.bucket == large
    state, output = schedule(state, (BucketsLoaded((small, small)),))
    assert output.step is not None
    assert output.step.bucket == small
    assert state.buckets == (small, large)


def test_as_many_sequences_run_as_loaded_buckets_hold() -> None:
    """A server begins with buckets for some rows; the others join when larger ones are loaded."""
    few = (Bucket(2), Bucket(2, 16, 2, scores=True))
    many = (Bucket(4), Bucket(4, 16, 4, scores=True))
    limits = make_limits(max_num_seqs=4, buckets=(*few, *many))
    state = initial_state(limits, few)
    requests = [make_request(f"r{i}", [i] * 3, arrival=i, max_tokens=50) for i in range(4)]
    state, output = schedule(state, [Arrive(request) for request in requests])
    assert shape(output.step) == ([], [("r0", 3), ("r1", 3)])
    state, output = schedule(state, ())
    assert shape(output.step) == (["r0", "r1"], [])
    state, output = schedule(state, (BucketsLoaded(many[:1]),))  # none holds a prompt next to these
    assert shape(output.step) == (["r0", "r1"], [])
    state, output = schedule(state, (BucketsLoaded(many[1:]),))
    assert shape(output.step) == (["r0", "r1"], [("r2", 3), ("r3", 3)])
    assert {seq.slot for seq in state.running} == {0, 1, 2, 3}
    assert (state.num_slots, state.free_slots) == (4, ())


def test_prefills_shrink_to_a_bucket_with_all_decodes() -> None:
    buckets = (Bucket(4), Bucket(0, 64, 4), Bucket(1, 32, 2), Bucket(4, 8, 1, scores=True))
    limits = make_limits(max_num_batched_tokens=64, buckets=buckets)
    drive = Drive(limits, depth=1)
    output = drive.arrive(make_request("a", [1] * 8, max_tokens=50))
    assert shape(output.step) == ([], [("a", 8)])
    output = drive.arrive(make_request("b", [2] * 40, arrival=1))
    assert shape(output.step) == (["a"], [("b", 32)])
    output = drive.arrive(make_request("c", [3] * 40, arrival=2))
    assert shape(output.step) == (["a"], [("b", 8), ("c", 24)])
    assert shape(drive.tick().step) == (["a", "b"], [("c", 8)])
    assert shape(drive.tick().step) == (["a", "b"], [("c", 8)])
    assert shape(drive.tick().step) == (["a", "b", "c"], [])


SCORING = (Bucket(4), Bucket(0, 32, 4), Bucket(4, 8, 2, scores=True))


def test_a_prompt_that_is_scored_has_a_bucket_that_scores() -> None:
    limits = make_limits(max_num_batched_tokens=32, buckets=SCORING)
    drive = Drive(limits, depth=1)
    plain = make_request("plain", [1] * 12, max_tokens=4)
    scored = make_request("scored", [2] * 12, max_tokens=4, prompt_logprobs=1, arrival=1)
    last = make_request("last", [3] * 12, max_tokens=4, arrival=2)
    step = drive.arrive(plain, scored, last).step
    assert shape(step) == ([], [("plain", 12)]), "more tokens than the bucket that scores has"
    step = drive.tick().step
    assert shape(step) == (["plain"], [("scored", 8)]) and step and step.bucket.scores
    step = drive.tick().step
    assert shape(step) == (["plain"], [("scored", 4), ("last", 4)]) and step and step.bucket.scores
    drive.finish()
    scores = [entry for event in drive.events for entry in event.output.prompt_logprobs]
    assert len(scores) == 11


def test_the_rest_of_a_scored_prompt_may_need_no_score() -> None:
    """So it is when a preempted sequence prefills its own output, and for the last prompt token."""
    limits = make_limits(max_num_batched_tokens=32, buckets=SCORING)
    drive = Drive(limits, depth=1)
    drive.arrive(make_request("a", [1] * 8, max_tokens=20, prompt_logprobs=1))
    (seq,) = drive.state.running
    assert not seq.scores
    one = make_request("b", [2], prompt_logprobs=1, arrival=1)
    assert shape(drive.arrive(one).step) == (["a"], [("b", 1)])
    assert not drive.state.running[1].scores, "the first token has no logprob"


def test_prefill_rows_are_limited_by_the_bucket() -> None:
    drive = Drive(make_limits(buckets=(Bucket(4, 16, 2, scores=True),)), depth=1)
    output = drive.arrive(*(make_request(f"r{i}", [i] * 3, arrival=i) for i in range(4)))
    assert shape(output.step) == ([], [("r0", 3), ("r1", 3)])
    assert shape(drive.tick().step) == (["r0", "r1"], [("r2", 3), ("r3", 3)])


# Two sequences of 8 prompt tokens fill 2 pages of 4 tokens each. Both need a third page at their
# first decode, when ``spare`` pages are free.
@pytest.mark.parametrize(
    ("spare", "priorities", "kept", "preempted"),
    [
        (2, (0, 0), ["a", "b"], []),
        (1, (0, 0), ["a"], ["b"]),
        (0, (0, 0), ["a"], ["b"]),
        (0, (1, 0), ["b"], ["a"]),
        (1, (1, 0), ["b"], ["a"]),
    ],
    ids=("enough", "last-yields-itself", "last-yields", "priority-yields", "priority-self"),
)
@pytest.mark.parametrize("depth", (1, 2))
def test_preemption(
    spare: int, priorities: tuple[int, int], kept: list[str], preempted: list[str], depth: int
) -> None:
    limits = make_limits(num_pages=5 + spare, enable_prefix_caching=False)
    drive = Drive(limits, depth=depth)
    requests = [
        make_request(name, [i] * 8, arrival=i, priority=priority, max_tokens=6)
        for i, (name, priority) in enumerate(zip("ab", priorities, strict=True))
    ]
    drive.arrive(*requests)
    assert sorted(running(drive)) == ["a", "b"]
    output = drive.tick()
    assert shape(output.step) == (kept, [])
    assert (running(drive), waiting(drive)) == (kept, preempted)
    drive.finish()
    assert drive.tokens() == {r.request_id: expected_tokens(r, 64) for r in requests}


def test_the_first_prompt_does_not_wait_for_pages_of_its_windows_that_others_share() -> None:
    """The second request takes a page that the first returned, and decodes for 20 tokens."""
    limits = make_limits(
        page_size=4,
        num_pages=(41, 6),
        max_num_batched_tokens=7,
        align=4,
        groups=(PageGroup(), PageGroup(window=6, pool=1)),
    )
    prompt = list(range(29))
    drive = Drive(limits, depth=1)
    drive.arrive(make_request("first", prompt, max_tokens=8))
    drive.tick()
    drive.tick()
    output = drive.arrive(make_request("other", [*prompt[:4], 50], arrival=1, max_tokens=20))
    while drive.state.num_unfinished:
        if "first" in running(drive) and output.step is not None:
            assert "first" in {row.request_id for row in output.step.rows}
        output = drive.tick()
    assert drive.state.num_preemptions == 1


def test_a_preempted_sequence_prefills_its_output_and_reports_its_first_admission() -> None:
    drive = Drive(make_limits(num_pages=11), depth=2)
    requests = [make_request(n, [i] * 8, arrival=i, max_tokens=18) for i, n in enumerate("ab")]
    drive.arrive(*requests)
    drive.finish()
    admissions = [a for plan in drive.plans for a in plan.admissions if a.request.request_id == "b"]
    first, again = admissions
    assert (first.num_prompt_tokens, len(first.token_ids)) == (8, 8)
    assert again.num_prompt_tokens == 8
    assert len(again.token_ids) > 8
    rows = [row for plan in drive.plans for row in plan.prefills if row.request_id == "b"]
    assert rows[-1].num_computed_tokens > 0, "it has reused its own cached pages"
    assert {e.num_cached_tokens for e in drive.events if e.request_id == "b"} == {0}
    assert drive.tokens() == {r.request_id: expected_tokens(r, 64) for r in requests}


@pytest.mark.parametrize(
    ("prompt", "changes", "limits", "num_cached"),
    [
        ([1] * 12, {}, {}, 8),
        ([1] * 13, {}, {}, 12),
        ([1] * 14, {}, {}, 12),
        ([1] * 4, {}, {}, 0),
        ([1] * 9 + [2] * 8, {}, {}, 8),
        ([2] + [1] * 12, {}, {}, 0),
        ([1] * 13, {"cache_salt": "tenant"}, {}, 0),
        ([1] * 13, {"prompt_logprobs": 0}, {}, 0),
        ([1] * 13, {"taps": ("embed",)}, {"points": (POINT,)}, 0),
        ([1] * 13, {"steering": Steering(b"", b"a")}, {"points": (POINT,)}, 0),
        ([1] * 13, {}, {"enable_prefix_caching": False}, 0),
    ],
    ids=(
        "one-token-is-computed",
        "full-pages",
        "full-pages-and-more",
        "one-page",
        "a-common-beginning",
        "another-beginning",
        "salt",
        "prompt-logprobs",
        "taps",
        "steering",
        "off",
    ),
)
def test_cached_prefix(
    prompt: list[int], changes: dict[str, Any], limits: dict[str, Any], num_cached: int
) -> None:
    drive = Drive(make_limits(**limits))
    drive.arrive(make_request("a", [1] * 13, max_tokens=1))
    drive.finish()
    drive.arrive(make_request("b", prompt, arrival=1, max_tokens=3, **changes))
    drive.finish()
    assert {e.num_cached_tokens for e in drive.events if e.request_id == "b"} == {num_cached}
    row = next(r for plan in drive.plans for r in plan.prefills if r.request_id == "b")
    assert row.num_computed_tokens == num_cached


def test_pages_are_shared_while_their_first_owner_runs_but_not_before_they_are_written() -> None:
    drive = Drive(make_limits(max_num_batched_tokens=64), depth=1)
    drive.call(
        Arrive(make_request("a", [1] * 20, max_tokens=30)),
        Arrive(make_request("b", [1] * 20, max_tokens=30, arrival=1)),
    )
    drive.arrive(make_request("c", [1] * 20, max_tokens=30, arrival=2))
    a, b, c = (list(seq.pages[0].ids) for seq in drive.state.running)
    assert not set(a) & set(b), "nothing was committed when b was admitted"
    assert c[:4] == a[:4] and c[4] != a[4]
    drive.finish()


def test_prompts_are_hashed_up_to_the_first_unknown_page_and_fully_when_computed() -> None:
    drive = Drive(make_limits(max_num_batched_tokens=64), depth=1)
    drive.arrive(make_request("a", [1] * 20, max_tokens=30))
    (a,) = drive.state.running
    assert len(a.page_hashes) == 1, "the first page is already unknown"
    drive.arrive(make_request("b", [1] * 8 + [2] * 12, max_tokens=30, arrival=1))
    a, b = drive.state.running
    assert (len(a.page_hashes), len(b.page_hashes)) == (5, 3)
    assert b.num_cached_tokens == 8
    drive.tick()
    a, b = drive.state.running
    assert len(b.page_hashes) == 5 and b.page_hashes[:2] == a.page_hashes[:2]
    drive.finish()


def test_generated_tokens_are_reused_too() -> None:
    drive = Drive(make_limits())
    first = make_request("a", [1] * 6, max_tokens=10)
    drive.arrive(first)
    drive.finish()
    conversation = [*first.prompt_token_ids, *drive.tokens()["a"], 3]
    drive.arrive(make_request("b", conversation, arrival=1))
    drive.finish()
    # 16 tokens are known, but the last was not computed: 15 fill three pages
    assert drive.endings()["b"].num_cached_tokens == 12


def test_no_step_without_requests() -> None:
    drive = Drive(make_limits())
    assert drive.call().step is None
    assert drive.state.next_step_id == 0


def test_only_steps_with_a_tapped_or_steered_row_have_buckets_that_tap() -> None:
    """The fake executor checks this for every step; here both kinds of steps occur."""
    drive = Drive(make_limits(points=(POINT,)))
    plain = make_request("plain", [1] * 9, max_tokens=12)
    tapped = make_request("tapped", [2] * 20, arrival=1, max_tokens=3, taps=("embed",))
    steered = make_request("steered", [3], arrival=2, steering=Steering(b"", b"a"), max_tokens=2)
    drive.arrive(plain)
    drive.tick()
    drive.arrive(tapped, steered)
    drive.finish()
    kinds = [bool(plan.bucket.variants) for plan in drive.plans]
    assert not kinds[0] and not kinds[-1] and True in kinds
    assert drive.tokens() == {
        r.request_id: expected_tokens(r, 64) for r in (plain, tapped, steered)
    }


def test_pages_of_steered_requests_serve_only_the_same_steering() -> None:
    drive = Drive(make_limits(points=(POINT,)))
    one, other = Steering(b"", b"a"), Steering(b"", b"b")
    cached: list[int] = []
    for number, steering in enumerate((one, None, other, one, None)):
        request = make_request(f"{number}", [1] * 13, max_tokens=2, steering=steering)
        drive.arrive(request)
        drive.finish()
        cached += {e.num_cached_tokens for e in drive.events if e.request_id == request.request_id}
    assert cached == [0, 0, 0, 12, 12]
