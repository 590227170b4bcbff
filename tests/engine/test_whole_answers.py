"""Deltas of answers that are not streamed come several at a time, and lose nothing."""

from __future__ import annotations

import pytest

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.link.whole import MAX_HELD, WholeAnswers
from jaxinfer.engine.requests.news import EngineStats, News
from jaxinfer.engine.requests.outputs import Delta, joined


def delta(name: str, token: int, index: int = 0, *, ends: bool = False) -> Delta:
    """One token of a completion."""
    reason = FinishReason.LENGTH if ends else None
    return Delta(name, index, text=f"{token} ", token_ids=(token,), finish_reason=reason)


def news(*deltas: Delta) -> News:
    """An iteration with these deltas."""
    return News(deltas, (), (), EngineStats())


@pytest.mark.parametrize("length", [1, 2, MAX_HELD, MAX_HELD + 1, MAX_HELD + 2, 3 * MAX_HELD])
def test_a_whole_answer_comes_a_few_times(length: int) -> None:
    """The first token at once, then ``MAX_HELD`` at a time; a streamed one is not held."""
    answers = WholeAnswers()
    answers.add("whole", 1)
    found, times = list[Delta](), 0
    for token in range(length):
        ends = token == length - 1
        own = delta("whole", token, ends=ends)
        passed = answers.passed(news(own, delta("streamed", token))).deltas
        assert passed[-1].request_id == "streamed"
        found += passed[:-1]
        times += bool(passed[:-1])
        assert passed[:-1] or token > 0, "the first token waits"
    assert joined(found).token_ids == tuple(range(length))
    assert joined(found).text == "".join(f"{token} " for token in range(length))
    assert found[-1].finish_reason is FinishReason.LENGTH
    assert times <= 2 + (length - 1) // MAX_HELD and len(found) == length
    assert answers.passed(news(delta("whole", 0))).deltas, "it is forgotten at its end"


def test_completions_of_a_request_are_held_apart() -> None:
    """The second of two may begin when the first has ended."""
    answers = WholeAnswers()
    answers.add("two", 2)
    found = list[Delta]()
    for index in range(2):
        for token in range(5):
            own = delta("two", 10 * index + token, index, ends=token == 4)
            found += answers.passed(news(own)).deltas
    assert [one.token_ids[0] for one in found] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_a_request_that_is_forgotten_is_not_held() -> None:
    """After an abort its last delta passes."""
    answers = WholeAnswers()
    answers.add("gone", 1)
    answers.passed(news(delta("gone", 0)))
    assert not answers.passed(news(delta("gone", 1))).deltas
    answers.forget("gone")
    assert answers.passed(news(delta("gone", 2))).deltas
