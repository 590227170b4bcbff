"""Requests beyond the context (128 tokens here) are refused in the words that clients match on."""

from __future__ import annotations

from typing import Any

import pytest

from kit.api_calls import CHAT, CHATS, COMPLETIONS, GENERATE, ask, refusal
from kit.server import Serving

WORDS = "This model's maximum context length is 128 tokens"


def exceeded(server: Serving, path: str, **fields: Any) -> Any:
    """The error of a request that is too long, in a stream as well."""
    error = refusal(server, path, **fields)
    assert WORDS in error["message"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    if path != "/tokenize":
        assert refusal(server, path, **fields, stream=True) == error
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 128}, "prompt"),
        (COMPLETIONS, {"prompt": [65] * 128}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * 200]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[65], [65] * 200, [65] * 300]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "x" * 20_000}, "prompt"),  # more characters than can fit
        (COMPLETIONS, {"prompt": ["x", "x" * 20_000]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "x" * 128, "max_tokens": 500}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 128, "max_tokens": 0, "echo": True}, "prompt"),
        (COMPLETIONS, {"prompt": [65] * 500, "truncate_prompt_tokens": 128}, "prompt"),
        (GENERATE, {"prompt": "x" * 128}, "prompt"),
        (GENERATE, {"prompt": [65] * 128}, "prompt"),
        (GENERATE, {"prompt": "x" * 20_000}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 20_000}, "prompt"),
    ],
)
def test_prompts(server: Serving, path: str, fields: dict[str, Any], param: str) -> None:
    assert exceeded(server, path, **fields)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 100, "max_tokens": 29}, "max_tokens"),
        (COMPLETIONS, {"prompt": [65] * 100, "max_tokens": 29}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["x", "x" * 100], "max_tokens": 29}, "max_tokens"),
        (COMPLETIONS, {"prompt": [[65], [65] * 100], "max_tokens": 29}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2**31 - 1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 500, "n": 3}, "max_tokens"),
        (
            COMPLETIONS,
            {"prompt": [65] * 500, "truncate_prompt_tokens": -1, "max_tokens": 128},
            "max_tokens",
        ),
        (GENERATE, {"prompt": "x" * 100, "max_tokens": 29}, "max_tokens"),
        (GENERATE, {"prompt": [65] * 100, "max_tokens": 29}, "max_tokens"),
        (CHATS, {**CHAT, "max_tokens": 128}, "max_tokens"),
        (CHATS, {**CHAT, "max_completion_tokens": 128}, "max_completion_tokens"),
        (CHATS, {**CHAT, "max_completion_tokens": 128, "max_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_requested_tokens(server: Serving, path: str, fields: dict[str, Any], param: str) -> None:
    error = exceeded(server, path, **fields)
    assert error["param"] == param and f"lower {param} to at most" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "x" * 120, "max_tokens": 8}),
        (COMPLETIONS, {"prompt": "x" * 120}),  # the default of 16 is not a request: it is lowered
        (COMPLETIONS, {"prompt": "x" * 120, "max_tokens": None}),
        (COMPLETIONS, {"prompt": "x" * 127, "max_tokens": 0, "echo": True}),
        (GENERATE, {"prompt": "x" * 120}),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 116}]}),
        (CHATS, {**CHAT, "max_tokens": 500, "max_completion_tokens": 2}),
    ],
)
def test_requests_that_fit(server: Serving, path: str, fields: dict[str, Any]) -> None:
    answer = ask(server, path, **fields, temperature=0, ignore_eos=True)
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] in (128, 127, len("hi") + 6)
