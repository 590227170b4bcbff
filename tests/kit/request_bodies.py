"""Bodies of requests, parsed as in the server.

Owns: the minimal bodies, ``read``, ``refusal`` and ``fit_beams``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.core.beam_search import MAX_BEAM_WIDTH
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.beams import WITHOUT
from jaxinfer.server.openai.parse import parse
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest, GenerateRequest
from jaxinfer.server.openai.structured import GUIDED

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
FORMS = ("response_format", "structured_outputs", *GUIDED)
KINDS = (CompletionRequest, ChatCompletionRequest, GenerateRequest)


def minimal(kind: type) -> dict[str, Any]:
    """The minimal body of a kind of request."""
    return CHAT if kind is ChatCompletionRequest else PROMPT


def read(body: Any, kind: type = CompletionRequest, **options: Any) -> Any:
    """The request in a body."""
    return parse(json.dumps(body).encode(), kind, **options).request


def refusal(body: Any, kind: type = CompletionRequest, **options: Any) -> ApiError:
    """The error for an invalid body; checks that it is short and not in msgspec's words."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, kind, **options)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert "$" not in error.message and "`" not in error.message  # as in msgspec's messages
    assert len(error.message) < 300
    return error


def fit_beams(body: dict[str, Any]) -> None:
    """Remove fields that a beam search cannot follow from a body that asks for one."""
    if body.get("use_beam_search"):
        for name in (*WITHOUT, *FORMS, "stream_options", "echo", "tool_choice"):
            body.pop(name, None)
        if isinstance(body.get("n"), int | float):
            body["n"] = min(body["n"], MAX_BEAM_WIDTH)
