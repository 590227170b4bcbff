"""The rules of requests' fields that their types do not express, as JSON schemas.

Owns: ``complete``, which adds them to the schema of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.core.request import INT32_MAX
from jaxinfer.server.openai.fields import AnyRequest
from jaxinfer.server.openai.pooling import (
    ENCODINGS,
    POOLING_TASKS,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxinfer.server.openai.schema import MAX_PROMPTS, CompletionRequest, TokenizeRequest
from jaxinfer.server.openai.tools import MAX_TOOLS


def complete(schema: dict[str, Any], request: type[AnyRequest], models: Sequence[str]) -> None:
    """Add to a request's schema the rules that its types do not express, in place."""
    properties: dict[str, Any] = schema["properties"]
    if request is CompletionRequest:
        properties["prompt"]["anyOf"] = _prompt_forms()
    if request is TokenizeRequest:
        schema["oneOf"] = [_exactly_one("prompt", "messages"), _exactly_one("messages", "prompt")]
    if issubclass(request, EmbeddingRequest):
        properties["input"]["anyOf"] = _prompt_forms()
        properties["encoding_format"]["enum"] = list(ENCODINGS)
    if request is PoolingRequest:
        properties["task"]["enum"] = list(POOLING_TASKS)
    if request is ScoreRequest:
        schema["oneOf"] = [_pair("text_1", "text_2"), _pair("queries", "documents")]
    if request is RerankRequest:
        text = object_schema({"text": {"type": "string"}}, "text")
        properties["documents"]["items"] = {"anyOf": [{"type": "string"}, text]}
    if "messages" in properties:
        messages = properties["messages"]
        for form in messages.get("anyOf", [messages]):
            if form["type"] == "array":
                form["items"] = _message()
    if "tools" in properties:
        for form in properties["tools"]["anyOf"]:
            if form["type"] == "array":
                form |= {"items": _tool(), "maxItems": MAX_TOOLS}
    if "tool_choice" in properties:
        properties["tool_choice"]["anyOf"] = _tool_choices()
    if models:
        properties["model"]["anyOf"][0]["enum"] = list(models)
    for name in properties.keys() - set(schema["required"]):
        properties[name] = _or_null(properties[name])
    for name, neutral in request.unsupported.items():
        properties[name] = {
            "enum": list(neutral),
            "description": "Not supported: only these values, which have no effect, are accepted.",
        }
    for name in request.ignored:
        properties[name] = {"description": "Accepted, without an effect."}


def _exactly_one(given: str, absent: str) -> dict[str, Any]:
    """Schema: exactly one of two fields."""
    forms = {given: {"not": {"type": "null"}}, absent: {"type": "null"}}
    return {"required": [given], "properties": forms}


def _pair(queries: str, documents: str) -> dict[str, Any]:
    """Schema: these two fields of ``ScoreRequest``, and not the others."""
    others = {"text_1", "text_2", "queries", "documents"} - {queries, documents}
    forms = {name: {"not": {"type": "null"}} for name in (queries, documents)}
    return {
        "required": [queries, documents],
        "properties": forms | {name: {"type": "null"} for name in sorted(others)},
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be null, which is its default."""
    default = schema.pop("default", None)
    forms = schema.pop("anyOf", None) or [schema]
    if {"type": "null"} not in forms:
        forms = [*forms, {"type": "null"}]
    return {"anyOf": forms} | ({} if default is None else {"default": default})


def _prompt_forms() -> list[dict[str, Any]]:
    """The four forms of a prompt; the type of the struct also allows a mixture of them."""
    token_ids = {"type": "array", "items": token_id(), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    return [
        {"type": "string"},
        {**several, "items": {"type": "string"}},
        token_ids,
        {**several, "items": token_ids},
    ]


def token_id() -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": INT32_MAX}


def _message() -> dict[str, Any]:
    """One message of a chat, with the same rules as ``text.messages``."""
    text = {"type": "string"}
    part = object_schema({"type": {"const": "text"}, "text": text}, "type", "text")
    content = [text, {"type": "array", "items": part}]
    usual = object_schema({"role": text, "content": {"anyOf": content}}, "role", "content")
    optional = {"anyOf": [*content, {"type": "null"}]}
    roles = {"enum": ["assistant", "tool"]}
    return {"anyOf": [usual, object_schema({"role": roles, "content": optional}, "role")]}


def _tool() -> dict[str, Any]:
    """A tool, with the same rules as ``tools.tool_choice``."""
    name = {"type": "string", "pattern": "^[!-~]{1,64}$"}
    parameters = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    text = {"type": ["string", "null"]}
    fields = {"name": name, "description": text, "parameters": parameters}
    function = object_schema(fields, "name")
    return object_schema({"type": {"const": "function"}, "function": function}, "type", "function")


def _tool_choices() -> list[dict[str, Any]]:
    """The forms of ``tool_choice``; required ones need tools."""
    function = object_schema({"name": {"type": "string"}}, "name")
    named = object_schema({"type": {"const": "function"}, "function": function}, "type", "function")
    return [{"enum": ["none", "auto", "required"]}, named]


def object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields."""
    return {"type": "object", "properties": properties, "required": list(required)}
