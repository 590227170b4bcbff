"""The rules of requests' fields that their types do not express, as JSON schemas.

Owns: ``complete``, which adds them to the schema of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.core.structured import MAX_REGEX_BYTES
from jaxinfer.server.api.fields import RequestPart
from jaxinfer.server.api.tools import MAX_TOOLS
from jaxinfer.server.ollama.schema import OllamaChatRequest, OllamaShowRequest
from jaxinfer.server.openai.pooling import (
    ENCODINGS,
    POOLING_TASKS,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxinfer.server.openai.schema import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
)
from jaxinfer.server.responses.items import ROLES
from jaxinfer.server.responses.schema import ResponsesRequest
from jaxinfer.server.responses.tools import HOSTED


def complete(schema: dict[str, Any], request: type[RequestPart], models: Sequence[str]) -> None:
    """Add to a request's schema the rules that its types do not express, in place."""
    properties: dict[str, Any] = schema["properties"]
    if request is CompletionRequest:
        properties["prompt"]["anyOf"] = _prompt_forms()
    if request is TokenizeRequest:
        schema["oneOf"] = [
            _given("prompt", absent=["messages"]),
            _given("messages", absent=["prompt"]),
        ]
    if issubclass(request, EmbeddingRequest):
        properties["input"]["anyOf"] = _prompt_forms()
        properties["encoding_format"]["enum"] = list(ENCODINGS)
    if request is PoolingRequest:
        properties["task"]["enum"] = list(POOLING_TASKS)
    if request is ScoreRequest:
        schema["oneOf"] = [
            _given("text_1", "text_2", absent=["documents", "queries"]),
            _given("queries", "documents", absent=["text_1", "text_2"]),
        ]
    if request is RerankRequest:
        text = object_schema({"text": {"type": "string"}}, "text")
        properties["documents"]["items"] = {"anyOf": [{"type": "string"}, text]}
    is_chat = issubclass(request, ChatCompletionRequest | TokenizeRequest)
    if is_chat:
        messages = properties["messages"]
        for form in messages.get("anyOf", [messages]):
            if form["type"] == "array":
                form["items"] = _message()
        for form in properties["tools"]["anyOf"]:
            if form["type"] == "array":
                form |= {"items": _tool(), "maxItems": MAX_TOOLS}
    if request is OllamaChatRequest:
        properties["tools"]["anyOf"][0]["items"] = _tool()
        properties["tools"]["anyOf"][0]["maxItems"] = MAX_TOOLS
    if request is OllamaShowRequest:
        schema["anyOf"] = [_given("model"), _given("name")]
    if is_chat and "tool_choice" in properties:
        properties["tool_choice"]["anyOf"] = _tool_choices()
    if request is ResponsesRequest:
        _complete_responses(properties)
    if models and "model" in properties:
        model = properties["model"]
        model.get("anyOf", [model])[0]["enum"] = list(models)
    for name in properties.keys() - set(schema["required"]):
        properties[name] = _or_null(properties[name])
    for name, neutral in request.unsupported.items():
        properties[name] = {
            "enum": list(neutral),
            "description": "Not supported: only these values, which have no effect, are accepted.",
        }
    for name in request.ignored:
        properties[name] = {"description": "Accepted, without an effect."}


def _given(*names: str, absent: Sequence[str] = ()) -> dict[str, Any]:
    """Schema: these fields are there, and the others are not."""
    forms: dict[str, Any] = {name: {"not": {"type": "null"}} for name in names}
    forms |= {name: {"type": "null"} for name in absent}
    return {"required": list(names), "properties": forms}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be null, which is its default."""
    about = {name: schema.pop(name) for name in ("default", "description") if name in schema}
    if about.get("default", ...) is None:
        del about["default"]
    forms = schema.pop("anyOf", None) or [schema]
    if {"type": "null"} not in forms:
        forms = [*forms, {"type": "null"}]
    return {"anyOf": forms, **about}


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
    role = {"type": "string", "minLength": 1}
    usual = object_schema({"role": role, "content": {"anyOf": content}}, "role", "content")
    optional = {"anyOf": [*content, {"type": "null"}]}
    roles = {"enum": ["assistant", "tool"]}
    return {"anyOf": [usual, object_schema({"role": roles, "content": optional}, "role")]}


def _function() -> dict[str, Any]:
    """The fields of a function, with the same rules as ``tools.tool_choice``."""
    name = {"type": "string", "pattern": "^[!-~]{1,64}$"}
    parameters = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    text = {"type": ["string", "null"]}
    return {"name": name, "description": text, "parameters": parameters}


def _custom(*, is_nested: bool) -> dict[str, Any]:
    """The fields of a custom tool; ``is_nested``: a grammar is an object in its format."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_REGEX_BYTES // 4}
    grammar = {"syntax": {"enum": ["lark", "regex"]}, "definition": text}
    fields = {"grammar": object_schema(grammar, *grammar)} if is_nested else grammar
    kinds = [
        object_schema({"type": {"const": "text"}}, "type"),
        object_schema({"type": {"const": "grammar"}, **fields}, "type", *fields),
        {"type": "null"},
    ]
    named = {name: _function()[name] for name in ("name", "description")}
    return {**named, "format": {"anyOf": kinds}}


def _tool() -> dict[str, Any]:
    """A tool of a chat."""
    function = object_schema(_function(), "name")
    custom = object_schema(_custom(is_nested=True), "name")
    return {
        "anyOf": [
            object_schema({"type": {"const": "function"}, "function": function}, "function"),
            object_schema({"type": {"const": "custom"}, "custom": custom}, "type", "custom"),
        ]
    }


def _tool_choices() -> list[dict[str, Any]]:
    """The forms of ``tool_choice``; required ones need tools."""
    function = object_schema({"name": {"type": "string"}}, "name")
    named = [
        object_schema({"type": {"const": kind}, kind: function}, "type", kind)
        for kind in ("function", "custom")
    ]
    allowed = object_schema(
        {
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": {"anyOf": named}, "minItems": 1},
        },
        "mode",
        "tools",
    )
    several = object_schema(
        {"type": {"const": "allowed_tools"}, "allowed_tools": allowed}, "type", "allowed_tools"
    )
    return [{"enum": ["none", "auto", "required"]}, *named, several]


def _complete_responses(properties: dict[str, Any]) -> None:
    """The rules of items and tools, as in ``responses.items`` and ``responses.schema``."""
    text, name = {"type": "string"}, {"type": "string", "minLength": 1}
    kinds = {"enum": ["input_text", "output_text"]}
    part = object_schema({"type": kinds, "text": text}, "type", "text")
    content = {"anyOf": [text, {"type": "array", "items": part}]}
    thought = object_schema({"text": text}, "text")
    thoughts = {"type": ["array", "null"], "items": thought}

    def item(kind: str, **fields: Any) -> dict[str, Any]:
        return object_schema({"type": {"const": kind}, **fields}, "type", *fields)

    items = [
        object_schema(
            {"type": {"const": "message"}, "role": {"enum": list(ROLES)}, "content": content},
            "role",
            "content",
        ),
        item(
            "function_call",
            call_id=name,
            name=name,
            arguments={"type": "string", "contentMediaType": "application/json"},
        ),
        item("function_call_output", call_id=name, output=content),
        item("custom_tool_call", call_id=name, name=name, input=text),
        item("custom_tool_call_output", call_id=name, output=content),
        item("reasoning", summary=thoughts),
    ]
    for form in properties["input"]["anyOf"]:
        if form["type"] == "array":
            form["items"] = {"anyOf": items}
    tools = [
        object_schema({"type": {"const": kind}, **fields}, "type", "name")
        for kind, fields in (("function", _function()), ("custom", _custom(is_nested=False)))
    ]
    listed = {"type": "array", "items": {"anyOf": tools}}
    space = {"type": {"const": "namespace"}, "name": name, "tools": listed}
    hosted = object_schema({"type": {"enum": list(HOSTED)}}, "type")
    properties["tools"]["anyOf"][0] |= {
        "items": {"anyOf": [*tools, object_schema(space, *space), hosted]},
        "maxItems": MAX_TOOLS,
    }
    kinds = {"enum": ["function", "custom"]}
    function = object_schema({"type": kinds, "name": name}, "type", "name")
    allowed = object_schema(
        {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": function},
        },
        "type",
        "mode",
        "tools",
    )
    properties["tool_choice"]["anyOf"] = [{"enum": ["none", "auto", "required"]}, function, allowed]


def object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields."""
    return {"type": "object", "properties": properties, "required": list(required)}
