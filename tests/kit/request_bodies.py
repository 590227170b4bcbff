"""Bodies of requests, parsed as in the server.

Owns: the minimal bodies, ``read`` and ``refusal``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.parse import parse
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest, GenerateRequest

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
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
