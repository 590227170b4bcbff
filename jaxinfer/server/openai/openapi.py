"""``/openapi.json``: requests and responses of every route, as OpenAPI 3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from jaxinfer.core.request import INT32_MAX
from jaxinfer.core.version import VERSION
from jaxinfer.server.http.errors import ErrorBody
from jaxinfer.server.http.guard import OPEN_PATHS
from jaxinfer.server.openai import responses
from jaxinfer.server.openai.descriptions import REQUEST_FIELDS, RESPONSE_FIELDS
from jaxinfer.server.openai.fields import AnyRequest
from jaxinfer.server.openai.schema import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    TokensRequest,
)
from jaxinfer.server.openai.tools import MAX_TOOLS

ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "A field is wrong, or the body is not JSON; param names the field.",
        401: "The API key is missing or wrong.",
        404: "No such route, or no such model.",
        405: "The route has other methods; the header Allow lists them.",
        408: "The deadline of the request or of the server has passed.",
        413: "The body is larger than the server allows.",
        415: "The content type is not application/json, or the body is compressed.",
        429: "The queue is full; try again after Retry-After seconds.",
        431: "The request's head is larger than the server allows.",
        500: "The engine or the server failed; the request can be sent again.",
        503: "The model is loading, the server is shutting down, or the engine has stopped.",
    }
)


class Operation(NamedTuple):
    """One method of one path. ``response`` is a struct, or the media type of another body."""

    name: str
    summary: str
    response: type[msgspec.Struct] | str | None  # None: an empty body
    request: type[AnyRequest] | None = None
    event: type[msgspec.Struct] | None = None  # the data of each event of a stream


OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("POST", "/v1/completions"): Operation(
            "createCompletion",
            "Continue prompts.",
            responses.Completion,
            CompletionRequest,
            responses.CompletionChunk,
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "createChatCompletion",
            "Answer a chat.",
            responses.ChatCompletion,
            ChatCompletionRequest,
            responses.ChatChunk,
        ),
        ("POST", "/v1/generate"): Operation(
            "generate",
            "Continue one prompt; text, token ids and times come back plainly.",
            responses.GenerateResponse,
            GenerateRequest,
            responses.GenerateResponse,
        ),
        ("POST", "/inference/v1/generate"): Operation(
            "generateTokens",
            "Continue token ids with token ids, in the form of vLLM's route.",
            responses.TokensResponse,
            TokensRequest,
            responses.TokensResponse,
        ),
        ("POST", "/tokenize"): Operation(
            "tokenize",
            "Token ids of a prompt, or of messages as the model would see them.",
            responses.Tokenized,
            TokenizeRequest,
        ),
        ("POST", "/detokenize"): Operation(
            "detokenize", "The text of token ids.", responses.Detokenized, DetokenizeRequest
        ),
        ("GET", "/v1/models"): Operation(
            "listModels", "The names under which the model is served.", responses.ModelList
        ),
        ("GET", "/v1/models/{model}"): Operation(
            "retrieveModel", "One of the names that /v1/models lists.", responses.ModelCard
        ),
        ("GET", "/health"): Operation("health", "Whether the engine's loop answers.", None),
        ("GET", "/ping"): Operation("ping", "As /health, under SageMaker's name.", None),
        ("POST", "/ping"): Operation("postPing", "As GET /ping.", None),
        ("GET", "/ready"): Operation("ready", "Whether new requests are taken.", None),
        ("GET", "/metrics"): Operation(
            "metrics", "Counters, gauges and histograms for Prometheus.", "text/plain"
        ),
        ("GET", "/stats"): Operation(
            "stats", "The same counters as JSON, with quantiles.", "application/json"
        ),
        ("GET", "/version"): Operation("version", "The server's version.", responses.Version),
        ("GET", "/openapi.json"): Operation("openapi", "This document.", "application/json"),
    }
)


@lru_cache(maxsize=1)
def openapi_document(
    *,
    secured: bool = False,
    models: tuple[str, ...] = (),
    vocab_size: int | None = None,
    root_path: str = "",
) -> dict[str, Any]:
    """The document; the last one is kept, so do not change it.

    ``secured``: whether the server has an API key. ``models`` and ``vocab_size`` are the served
    model's names and bound of token ids.
    """
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(operation, path, secured)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxinfer",
            "version": VERSION,
            "description": "OpenAI's endpoints over one model. A field that is null counts as "
            "absent. Unknown fields are ignored unless the server runs with --strict-fields.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(models, vocab_size),
            "responses": {f"Error{status}": _error(status) for status in ERRORS},
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of the server's --api-key values, if it has any.",
                }
            },
        },
    }


_REF = "#/components/schemas/{name}"


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _json(kind: type) -> dict[str, Any]:
    """A body that is this struct as JSON."""
    return {"application/json": {"schema": _ref(kind)}}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _schemas(models: Sequence[str], vocab_size: int | None) -> dict[str, Any]:
    """The schemas of all structs that requests and responses consist of."""
    operations = OPERATIONS.values()
    structs = {kind for one in operations for kind in (one.request, one.event, one.response)}
    kinds = [kind for kind in structs | {ErrorBody} if isinstance(kind, type)]
    kinds.sort(key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    requests = {one.request.__name__: one.request for one in operations if one.request is not None}
    inners = [inner for one in requests.values() for inner in one.nested.values()]
    requests |= {inner.__name__: inner for inner in inners}
    for name, schema in schemas.items():
        if name in requests:
            _complete(schema, requests[name], models)
        fields = REQUEST_FIELDS if name in requests else RESPONSE_FIELDS
        for field, described in schema.get("properties", {}).items():
            if "description" not in described:
                own = REQUEST_FIELDS.get(f"{name}.{field}")
                described["description"] = own or fields[field]
    if vocab_size is not None:
        _bound_token_ids(schemas, vocab_size - 1)
    return schemas


def _operation(operation: Operation, path: str, secured: bool) -> dict[str, Any]:
    names, segment = re.findall(r"{(\w+)}", path), {"type": "string", "minLength": 1}
    errors = {405, 431, 500, 503}
    if path not in OPEN_PATHS:
        errors.add(401)
    if names:
        errors.add(404)
    if operation.request is not None:
        errors |= {400, 404, 408, 413, 415}
    if operation.event is not None:
        errors.add(429)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": segment} for name in names),
            {
                "name": "X-Request-Id",
                "in": "header",
                "description": "The id of this request in the log; the answer has it too.",
                "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
            },
        ],
        "responses": {
            "200": _success(operation),
            **{
                str(status): {"$ref": f"#/components/responses/Error{status}"}
                for status in sorted(errors)
            },
        },
        "security": [{"apiKey": []}] if secured and 401 in errors else [],
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.request)}
    return described


def _success(operation: Operation) -> dict[str, Any]:
    """The response with status 200."""
    success: dict[str, Any] = {"description": operation.summary, "headers": _headers()}
    content: dict[str, Any] = {}
    if isinstance(operation.response, str):
        kind = "string" if operation.response.startswith("text/") else "object"
        content[operation.response] = {"schema": {"type": kind}}
    elif operation.response is not None:
        content |= _json(operation.response)
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(operation.event)}
    if content:
        success["content"] = content
    return success


def _event(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """One event of a stream; a struct in its data is JSON."""
    texts = [
        {"contentMediaType": "application/json", "contentSchema": _ref(struct)}
        for struct in (kind, ErrorBody)
    ]
    data = {"type": "string", "anyOf": [*texts, {"const": "[DONE]"}]}
    return _object({"data": data}, "data") | {
        "description": "With stream=true: an event for new tokens, then one whose data is [DONE]. "
        "A failure midway is an event with an error.",
    }


def _headers() -> dict[str, Any]:
    description = "The id of this request in the log."
    return {"X-Request-Id": {"description": description, "schema": {"type": "string"}}}


def _error(status: int) -> dict[str, Any]:
    """The response of an error."""
    headers = _headers()
    if status in (429, 503):
        headers["Retry-After"] = {
            "description": "Seconds to wait before trying again.",
            "schema": {"type": "integer", "minimum": 0},
        }
    return {"description": ERRORS[status], "headers": headers, "content": _json(ErrorBody)}


def _complete(schema: dict[str, Any], request: type[AnyRequest], models: Sequence[str]) -> None:
    """Add to a request's schema the rules that its types do not express, in place."""
    properties: dict[str, Any] = schema["properties"]
    if request is CompletionRequest:
        properties["prompt"]["anyOf"] = _prompt_forms()
    if request is TokenizeRequest:
        schema["oneOf"] = [_exactly_one("prompt", "messages"), _exactly_one("messages", "prompt")]
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


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be null, which is its default."""
    default = schema.pop("default", None)
    forms = schema.pop("anyOf", None) or [schema]
    if {"type": "null"} not in forms:
        forms = [*forms, {"type": "null"}]
    return {"anyOf": forms} | ({} if default is None else {"default": default})


def _prompt_forms() -> list[dict[str, Any]]:
    """The four forms of a prompt; the type of the struct also allows a mixture of them."""
    token_ids = {"type": "array", "items": _token_id(), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    return [
        {"type": "string"},
        {**several, "items": {"type": "string"}},
        token_ids,
        {**several, "items": token_ids},
    ]


def _token_id() -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": INT32_MAX}


def _message() -> dict[str, Any]:
    """One message of a chat, with the same rules as ``text.messages``."""
    text = {"type": "string"}
    part = _object({"type": {"const": "text"}, "text": text}, "type", "text")
    content = [text, {"type": "array", "items": part}]
    usual = _object({"role": text, "content": {"anyOf": content}}, "role", "content")
    optional = {"anyOf": [*content, {"type": "null"}]}
    roles = {"enum": ["assistant", "tool"]}
    return {"anyOf": [usual, _object({"role": roles, "content": optional}, "role")]}


def _tool() -> dict[str, Any]:
    """A tool, with the same rules as ``tools.tool_choice``."""
    name = {"type": "string", "pattern": "^[!-~]{1,64}$"}
    parameters = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    text = {"type": ["string", "null"]}
    fields = {"name": name, "description": text, "parameters": parameters}
    function = _object(fields, "name")
    return _object({"type": {"const": "function"}, "function": function}, "function")


def _tool_choices() -> list[dict[str, Any]]:
    """The forms of ``tool_choice``; required ones need tools."""
    function = _object({"name": {"type": "string"}}, "name")
    named = _object({"type": {"const": "function"}, "function": function}, "type", "function")
    return [{"enum": ["none", "auto", "required"]}, named]


def _bound_token_ids(schema: Any, last: int) -> None:
    """Lower the bound of every list of token ids to the vocabulary's, in place."""
    if isinstance(schema, list):
        for inner in cast("list[Any]", schema):
            _bound_token_ids(inner, last)
    elif isinstance(schema, dict):
        for key, inner in cast("dict[str, Any]", schema).items():
            if key == "items" and inner == _token_id():
                inner["maximum"] = last
            _bound_token_ids(inner, last)
