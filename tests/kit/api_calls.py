"""Calls of a running server's API over HTTP.

Owns: ``ask`` for an answer, ``events`` for a stream, ``refusal`` for an error.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kit.server import Serving
from kit.tokenizers import TINY_BOS_ID, TINY_EOS_ID

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_IDS = [TINY_BOS_ID, 259, *b"hi", TINY_EOS_ID, 260]


def ask(server: Serving, path: str, **fields: Any) -> Any:
    """The JSON answer to a POST of the fields."""
    response = server.post(path, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int) -> Any:
    """The error in a response, in OpenAI's form; checks its own form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    if body.get("type") == "error":  # Anthropic's form
        assert body.keys() == {"type", "error", "request_id"}
        facts = body["error"].pop("details", {})
        return {**body["error"], "param": facts.get("param"), "code": facts.get("error_code")}
    if isinstance(body["error"], str):  # ollama's form
        assert body.keys() <= {"error", "code", "param"}
        return {"message": body["error"], "param": body.get("param"), "code": body.get("code")}
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def refusal(server: Serving, path: str, **fields: Any) -> Any:
    """The error for these fields."""
    return error_of(server.post(path, **fields), 400)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; checks the framing and the end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def same(got: Any, expected: Any) -> bool:
    """Equality except for rounding, which differs with the rows of a step.

    Two prompts of a request may reach the engine one step apart.
    """
    if isinstance(expected, float):
        return got == pytest.approx(expected, abs=1e-4)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in got)
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got == expected
