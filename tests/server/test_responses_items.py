"""The items of ``/v1/responses`` as messages of a chat, and the store of responses."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.server.responses.items import input_items, messages_of
from jaxinfer.server.responses.store import ResponseStore, StoredResponse, Turn


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def said(text: str) -> Any:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], "status": "completed"}


def thought(text: str, field: str = "content") -> Any:
    return {"type": "reasoning", "id": "rs", "summary": [], field: [{"text": text}]}


def called(number: int) -> Any:
    fields = {"call_id": str(number), "name": f"f{number}", "arguments": ""}
    return {"type": "function_call", **fields}


def call(number: int) -> Any:
    function = {"name": f"f{number}", "arguments": "{}"}
    return {"id": str(number), "type": "function", "function": function}


RESULT = {
    "type": "function_call_output",
    "call_id": "1",
    "output": [{"type": "input_text", "text": "r"}],
}
ANSWER = {"role": "assistant"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user("hi")]),
        (
            [user("hi"), thought("t"), said("a"), called(1), called(2), RESULT, said("b")],
            [
                user("hi"),
                {
                    **ANSWER,
                    "reasoning_content": "t",
                    "content": "a",
                    "tool_calls": [call(1), call(2)],
                },
                {"role": "tool", "tool_call_id": "1", "name": "f1", "content": "r"},
                {**ANSWER, "content": "b"},
            ],
        ),
        (
            [said("a"), said("b"), thought("t", "summary")],
            [
                {**ANSWER, "content": "a"},
                {**ANSWER, "content": "b"},
                {**ANSWER, "reasoning_content": "t"},
            ],
        ),
        ([thought("", "content"), called(1)], [{**ANSWER, "tool_calls": [call(1)]}]),
        ([called(1), said("a")], [{**ANSWER, "tool_calls": [call(1)]}, {**ANSWER, "content": "a"}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [user("a\nb")],
        ),
    ],
)
def test_items_are_messages(items: Any, messages: list[Any]) -> None:
    assert messages_of(input_items(items)) == messages


def test_instructions_are_the_systems() -> None:
    developer = {"role": "developer", "content": "Be kind."}
    items = [developer, user("hi"), developer]
    first, *others = messages_of(items, "Be short.")
    assert first == {"role": "system", "content": "Be short."} and others == items


def stored(name: str, before: Turn | None = None, size: int = 98) -> StoredResponse:
    """A response of 100 bytes, and a turn of ``size`` + 2."""
    return StoredResponse(name, b"x" * 100, Turn(before, ["y" * (size - 2)]))


def test_the_oldest_are_forgotten() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for name in "abcd":
        store.add(stored(name))
    assert [name for name in "abcd" if store.get(name)] == ["b", "c", "d"]
    assert store.num_bytes == 600
    assert store.remove("c") and not store.remove("c")
    assert store.num_bytes == 400
    store.add(stored("e", size=898))  # with its turn all that is allowed
    assert [name for name in "bde" if store.get(name)] == ["e"] and store.num_bytes == 1000
    store.add(stored("f", size=899))
    assert len(store) == store.num_bytes == 0


def test_turns_are_kept_for_later_ones() -> None:
    store = ResponseStore(max_responses=2, max_bytes=10_000)
    first = stored("a")
    second = stored("b", first.turn)
    third = stored("c", second.turn)
    for one in (first, second, third):
        store.add(one)
    assert store.get("a") is None and store.num_bytes == 2 * 100 + 3 * 100
    store.remove("b")
    assert len(third.turn.conversation()) == 3 and store.num_bytes == 100 + 3 * 100
    store.remove("c")
    assert store.num_bytes == 0
    store.add(stored("d", third.turn))  # a request that had begun before
    assert store.num_bytes == 100 + 4 * 100
