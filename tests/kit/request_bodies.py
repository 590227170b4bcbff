"""Bodies of requests, parsed as in the server.

Owns: the minimal bodies, ``read``, ``refusal``, ``fit_beams``,
``least_body``, ``may_contradict`` and ``without_field``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from jaxinfer.core.beam_search import MAX_BEAM_WIDTH
from jaxinfer.server.api.beams import WITHOUT
from jaxinfer.server.api.parse import parse
from jaxinfer.server.api.structured import GUIDED
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest, GenerateRequest

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
FORMS = ("response_format", "structured_outputs", *GUIDED)
KINDS = (CompletionRequest, ChatCompletionRequest, GenerateRequest)


def minimal(kind: type) -> dict[str, Any]:
    """The minimal body of a kind of request."""
    return CHAT if kind is ChatCompletionRequest else PROMPT


# by name of the struct; the fields that a body needs, or one of them
LEAST: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "CompletionRequest": PROMPT,
        "ChatCompletionRequest": CHAT,
        "GenerateRequest": PROMPT,
        "TokensRequest": {"token_ids": [1], "sampling_params": {}},
        "EmbeddingRequest": {"input": "a"},
        "PoolingRequest": {"input": "a"},
        "ScoreRequest": dict.fromkeys(("text_1", "text_2", "queries", "documents"), "a"),
        "RerankRequest": {"query": "a", "documents": ["a"]},
        "TokenizeRequest": PROMPT,
        "DetokenizeRequest": {"tokens": [1]},
        "MessagesRequest": {**CHAT, "max_tokens": 1},
        "CountTokensRequest": CHAT,
        "ResponsesRequest": {"input": "a"},
        "OllamaShowRequest": {"model": "m"},
        "OllamaChatRequest": {"model": "m"},
        "OllamaGenerateRequest": {"model": "m"},
        "OllamaEmbedRequest": {"model": "m", "input": "a"},
        "OllamaEmbeddingsRequest": {"model": "m", "prompt": "a"},
    }
)


# rules that no JSON schema without conditions can express
ACROSS_FIELDS = (
    "logprob_token_ids",
    "tool_choice",
    "stream_options",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "top_logprobs",
)
ACROSS_FIELDS += ("max_tokens", "best_of", "prompt", "n", "taps", "text_2", "documents")
ACROSS_FIELDS += ("background", "tool_choice.name", "thinking.budget_tokens")
ACROSS_FIELDS += ("system", "think")  # with raw, in ollama's form
# two tools with one name; a grammar that is none; calls in a last message of Anthropic's form;
# results without calls
ACROSS_ITEMS = re.compile(
    r"tools\[\d+\](\.function|\.tools\[\d+\])?\.name|messages\[\d+\](\.content\[\d+\]\.tool_use_id)?"
    r"|tools\[\d+\]\.input_schema|input\[\d+\]\.(arguments|call_id)|tool_choice\.tools\[\d\]"
    r"|tools\[\d+\](\.custom|\.tools\[\d+\])?\.format(\.grammar)?\.definition"
)


def may_contradict(param: str) -> bool:
    """True if a value that the schema allows may be refused for the values of other fields."""
    return param in ACROSS_FIELDS or ACROSS_ITEMS.fullmatch(param) is not None


def least_body(kind: type) -> dict[str, Any]:
    """The fields that a body of a kind of request needs, with small values."""
    assert kind.__name__ in LEAST, (
        f"{kind.__name__} has no least body; add one to LEAST in tests/kit/request_bodies.py"
    )
    return LEAST[kind.__name__]


def without_field(body: dict[str, Any], param: str, least: dict[str, Any]) -> dict[str, Any]:
    """The body without the field that an error names; for a field that is needed, with the
    ``least`` values of all such fields that it has, or of all. Errors name a field of an inner
    ``sampling_params`` as if it were the body's own.

    Fails if that changes nothing, so that leaving out fields ends.
    """
    name = re.split(r"[.\[]", param)[0]
    if name in least:
        given = {key: value for key, value in least.items() if body.get(key) is not None}
        changed = body | (given or least)
    elif name in (inner := body.get("sampling_params") or {}):
        kept = {key: value for key, value in inner.items() if key != name}
        changed = body | {"sampling_params": kept}
    else:
        changed = {key: value for key, value in body.items() if key != name}
    assert changed != body, (param, body)
    return changed


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
