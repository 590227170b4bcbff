"""The ends of requests (stop ids, length, refusal, abort, failure) and their events."""

import re
from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.step import (
    Abort,
    Arrive,
    Bucket,
    RowResult,
    StepDone,
    StepFailed,
    StepResult,
)
from jaxinfer.sched.commit import finish_reason
from jaxinfer.sched.schedule import initial_state
from jaxinfer.sched.state import Sequence
from kit.drive import EOS, Drive, make_limits, make_request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USER_STOP = 9


@pytest.mark.parametrize(
    ("output", "changes", "max_num_tokens", "expected"),
    [
        ((1,), {}, 99, (None, None)),
        ((1, EOS), {}, 99, (STOP, None)),
        ((1, USER_STOP), {}, 99, (STOP, USER_STOP)),
        ((1, EOS), {"eos_token_ids": ()}, 99, (None, None)),
        ((1, EOS), {"stop_token_ids": (EOS,)}, 99, (STOP, None)),
        ((1, EOS), {"eos_token_ids": (), "stop_token_ids": (EOS,)}, 99, (STOP, EOS)),
        ((1, EOS), {"min_tokens": 2}, 99, (STOP, None)),
        ((1, EOS), {"min_tokens": 3}, 99, (None, None)),
        ((1, USER_STOP), {"min_tokens": 3}, 99, (None, None)),
        ((1, 2), {}, 4, (LENGTH, None)),
        ((1, 2), {}, 5, (None, None)),
        ((1, EOS), {}, 4, (STOP, None)),
        ((1, EOS), {"min_tokens": 3}, 4, (LENGTH, None)),
    ],
    ids=(
        "continues",
        "eos",
        "user-stop",
        "ignore-eos",
        "eos-before-user-stop",
        "user-stop-is-eos",
        "min-tokens-reached",
        "min-tokens-not-reached-eos",
        "min-tokens-not-reached-stop",
        "length",
        "one-short-of-length",
        "stop-before-length",
        "length-despite-min-tokens",
    ),
)
def test_finish_reason(
    output: tuple[int, ...], changes: dict[str, Any], max_num_tokens: int, expected: tuple[Any, Any]
) -> None:
    fields = {"eos_token_ids": (EOS,), "stop_token_ids": (USER_STOP,)} | changes
    request = make_request("a", (5, 6), **fields)
    tokens = IntLog((5, 6, *output))
    seq = Sequence(request, (0, 0, "a"), tokens, max_num_tokens)
    assert finish_reason(seq, tokens) == expected


@pytest.mark.parametrize("depth", (1, 2, 3))
@pytest.mark.parametrize(
    ("max_tokens", "num_prompt", "num_output"), [(1, 3, 1), (5, 3, 5), (99, 60, 4), (99, 63, 1)]
)
def test_no_row_is_planned_beyond_the_length(
    max_tokens: int, num_prompt: int, num_output: int, depth: int
) -> None:
    drive = Drive(make_limits(max_num_batched_tokens=64), depth=depth)
    drive.arrive(make_request("a", [1] * num_prompt, max_tokens=max_tokens))
    drive.finish()
    assert len(drive.tokens()["a"]) == num_output
    assert drive.endings()["a"].finish_reason is LENGTH
    assert len(drive.plans) == num_output


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", ()), "prompt is empty"),
        (make_request("a", [1] * 64), "64 tokens.*max_model_len 64.*at most 63"),
        (
            make_request("a", [1] * 30, max_tokens=20),
            r"50 tokens, which need 13 pages of 4, but the pool has 10; lower max_tokens",
        ),
    ],
    ids=("empty", "too-long", "too-many-pages"),
)
def test_refusals(request_: Request, message: str) -> None:
    drive = Drive(make_limits(num_pages=11))
    output = drive.arrive(request_)
    (event,) = output.events
    assert event.request_id == "a"
    assert event.finish_reason is FinishReason.ERROR
    assert re.search(message, event.error)
    assert output.step is None
    assert drive.state.num_unfinished == 0


def test_a_request_that_fits_exactly_is_served() -> None:
    drive = Drive(make_limits(num_pages=11))
    drive.arrive(make_request("a", [1] * 30, max_tokens=10), make_request("b", [1] * 39))
    drive.finish()
    assert {e.finish_reason for e in drive.endings().values()} == {LENGTH, FinishReason.ERROR}


def test_a_duplicate_id_is_dropped_and_reported() -> None:
    drive = Drive(make_limits())
    drive.arrive(make_request("a", (1, 2), max_tokens=4))
    output = drive.arrive(make_request("a", (3, 3, 3), max_tokens=9, arrival=1))
    assert output.duplicates == ("a",)
    assert output.events == ()
    drive.finish()
    assert len(drive.tokens()["a"]) == 4


@pytest.mark.parametrize("failed", (False, True), ids=("done", "failed"))
def test_a_reused_id_gets_no_rows_of_the_earlier_request(failed: bool) -> None:
    drive = Drive(make_limits(), depth=2)
    drive.arrive(make_request("a", (1, 2, 3)))
    drive.tick()
    assert len(drive.state.in_flight) == 2
    drive.call(Abort("a"), Arrive(make_request("a", (4, 5), arrival=1, max_tokens=3)))
    if failed:
        drive.call(StepFailed(drive.flying.pop(0).step_id, "boom"))
    events = len(drive.events)
    drive.finish()
    assert sum(len(event.token_ids) for event in drive.events[events:]) == 3


@pytest.mark.parametrize("state", ("waiting", "prefilling", "decoding"))
def test_abort_frees_everything_in_one_call(state: str) -> None:
    drive = Drive(make_limits(max_num_seqs=1), depth=2)
    if state == "waiting":
        drive.arrive(make_request("other", (1,) * 9, max_tokens=30))
        free = drive.state.num_free_pages
    else:
        free = drive.limits.num_usable_pages
    drive.arrive(make_request("a", [2] * 40, arrival=1))
    for _ in range(4 if state == "decoding" else 0):
        drive.tick()
    output = drive.call(Abort("a", FinishReason.STOP))
    (event,) = output.events
    assert (event.request_id, event.finish_reason) == ("a", FinishReason.STOP)
    assert drive.state.num_free_pages == free
    assert "a" not in drive.state.orders
    assert drive.call(Abort("a")).events == ()


def test_abort_of_an_unknown_id_is_ignored() -> None:
    drive = Drive(make_limits())
    output = drive.call(Abort("unknown"))
    assert output.step is None and output.events == ()


@pytest.mark.parametrize(
    ("num_pages", "chunk", "recomputed"),
    [(10, 8, [False] * 3), (8, 16, [True])],
    ids=("while-decoding", "within-the-prompt"),
)
def test_prompt_logprobs_are_not_repeated_after_a_preemption(
    num_pages: int, chunk: int, recomputed: list[bool]
) -> None:
    drive = Drive(make_limits(num_pages=num_pages, max_num_batched_tokens=chunk), depth=1)
    drive.arrive(
        make_request("a", [1] * 12, max_tokens=14),
        make_request("b", [2] * 14, max_tokens=14, arrival=1, prompt_logprobs=0),
    )
    drive.finish()
    rows = [row for plan in drive.plans for row in plan.prefills if row.request_id == "b"]
    again = [row for row in rows if row.epoch > rows[0].epoch]
    assert again, "the pool is small enough to preempt"
    assert [row.target_ids is not None for row in again] == recomputed
    entries = [e for event in drive.events for e in event.output.prompt_logprobs]
    assert [entry.logprobs[0] for entry in entries] == [-1.0 - i for i in range(13)]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (StepDone(StepResult(4, ())), "step 4 ended but the oldest step in flight is 0"),
        (StepFailed(1, "boom"), "step 1 ended but the oldest step in flight is 0"),
        (StepDone(StepResult(0, ())), "no fitting row for request 'a'"),
        (StepDone(StepResult(0, (RowResult("a", 5, (1,)),))), "no fitting row for request 'a'"),
        (StepDone(StepResult(0, (RowResult("a", 0, ()),))), "no fitting row for request 'a'"),
    ],
    ids=("unknown-step", "wrong-order", "no-row", "wrong-epoch", "no-token"),
)
def test_a_result_that_does_not_fit_is_an_error(event: StepDone | StepFailed, message: str) -> None:
    drive = Drive(make_limits())
    drive.arrive(make_request("a", (1, 2)))
    with pytest.raises(EngineError, match=message):
        drive.call(event)


@pytest.mark.parametrize("buckets", [(Bucket(4),), (Bucket(2, 8, 2), Bucket(4))], ids=str)
def test_bucket_tables_must_serve_the_limits(buckets: tuple[Bucket, ...]) -> None:
    with pytest.raises(ConfigError, match="no bucket holds 3 decodes and 1 prefills"):
        initial_state(make_limits(buckets=buckets))


def test_the_bucket_for_a_prompt_next_to_all_other_rows_must_score() -> None:
    scoring = Bucket(4, 8, 1, scores=True)
    limits = make_limits(buckets=(scoring, Bucket(4)))
    assert initial_state(limits).buckets == (Bucket(4), scoring)
    with pytest.raises(ConfigError, match="3 decodes and 1 prefills with prompt logprobs"):
        initial_state(make_limits(buckets=(Bucket(4, 8, 1), Bucket(4))))
