"""Requests of Anthropic's API as chats, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.server.anthropic.schema import MessagesRequest
from jaxinfer.server.api.parse import parse


def chat_of(messages: list[Any], **fields: Any) -> Any:
    body = {"max_tokens": 9, "messages": messages, **fields}
    return parse(json.dumps(body).encode(), MessagesRequest).request.chat


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given, "cache_control": {"type": "ephemeral"}}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "id", "content": content, **fields}


CALLING = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "id", "name": "f", "input": {}}],
}
CALLED = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "",
    "tool_calls": [
        {"id": "id", "type": "function", "function": {"name": "f", "arguments": {}}},
    ],
}
A, B = ({"type": "text", "text": one} for one in "ab")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([user("a")], [user("a")]),
        ([user([text("a")])], [user("a")]),
        ([user([text("a"), text("b")])], [user([A, B])]),
        ([user("a"), user([text("b")])], [user([A, B])]),
        ([user([])], [user("")]),
        (
            [{"role": "system", "content": "s"}, user("a")],
            [{"role": "system", "content": "s"}, user("a")],
        ),
        (
            [CALLING, user([result("r"), result([text("a"), text("b")]), text("a")])],
            [
                CALLED,
                {"role": "tool", "tool_call_id": "id", "content": "r"},
                {"role": "tool", "tool_call_id": "id", "content": [A, B]},
                user("a"),
            ],
        ),
        (
            [CALLING, user([result(None, is_error=True)])],
            [CALLED, {"role": "tool", "tool_call_id": "id", "content": "", "is_error": True}],
        ),
    ],
)
def test_messages(given: list[Any], expected: list[Any]) -> None:
    assert list(chat_of(given).messages) == expected


def test_an_earlier_answer() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("a"),
        {"type": "tool_use", "id": "id", "name": "f", "input": {"b": 1}},
    ]
    _, answer, _ = chat_of([user("q"), assistant(blocks), user([result("r")])]).messages
    function = {"name": "f", "arguments": {"b": 1}}
    assert answer == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "id", "type": "function", "function": function}],
    }


def test_a_last_answer_is_continued() -> None:
    for messages, continues in (([user("a"), assistant("b")], True), ([user("a")], False)):
        chat = chat_of(messages)
        assert chat.continue_final_message is continues
        assert chat.add_generation_prompt is not continues


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("s", "s"),
        ("", None),
        ([text("a"), text("b")], [A, B]),
        ([text("x-anthropic-billing-header: cch=1;"), text("a")], "a"),
        ("x-anthropic-billing-header: cch=1;\na", "a"),
        ("a x-anthropic-billing-header: 1", "a x-anthropic-billing-header: 1"),
    ],
)
def test_system(system: Any, expected: Any) -> None:
    first = chat_of([user("q")], system=system).messages[0]
    assert first == ({"role": "system", "content": expected} if expected else user("q"))


def test_thinking_and_effort() -> None:
    for thinking, effort, variables in (
        (None, None, {}),
        ({"type": "disabled"}, "none", {}),
        ({"type": "adaptive"}, "low", {"enable_thinking": True, "thinking": True}),
        (
            {"type": "enabled", "budget_tokens": 7},
            "low",
            {"enable_thinking": True, "thinking": True},
        ),
    ):
        config = {} if thinking is None else {"output_config": {"effort": "low"}}
        chat = chat_of([user("q")], thinking=thinking, **config)
        assert (chat.reasoning_effort, chat.chat_template_kwargs) == (effort, variables)
        budget = (thinking or {}).get("budget_tokens")
        assert chat.thinking_token_budget == budget


def test_sampling_fields() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stream": True}
    chat = chat_of([user("q")], **fields, stop_sequences=["x"])
    assert {name: getattr(chat, name) for name in fields} == fields
    assert (chat.stop, chat.max_tokens, chat.output_limit()) == (("x",), 9, 9)
