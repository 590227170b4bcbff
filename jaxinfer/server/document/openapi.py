"""``/openapi.json``: requests and responses of every route, as OpenAPI 3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import msgspec

from jaxinfer.core.version import VERSION
from jaxinfer.server.document.descriptions import description_of
from jaxinfer.server.document.request_schemas import complete, object_schema, token_id
from jaxinfer.server.http.errors import AnthropicErrorBody, ErrorBody, OllamaErrorBody
from jaxinfer.server.http.guard import OPEN_PATHS
from jaxinfer.server.http.sse import LINES
from jaxinfer.server.service.endpoint import Route

ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "A field is wrong, or the body is not JSON; param names the field.",
        401: "The API key is missing or wrong.",
        404: "No such route, model or stored response.",
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


@lru_cache(maxsize=1)
def openapi_document(
    routes: tuple[Route, ...],
    *,
    secured: bool = False,
    models: tuple[str, ...] = (),
    vocab_size: int | None = None,
    root_path: str = "",
) -> dict[str, Any]:
    """The document; the last one is kept, so do not change it.

    ``routes``: those without a name are left out. ``secured``: whether the server has an API key.
    ``models`` and ``vocab_size`` are the served model's names and bound of token ids.
    """
    paths: dict[str, dict[str, Any]] = {}
    documented = [route for route in routes if route.name]
    for route in documented:
        method, path = route.key
        paths.setdefault(path, {})[method.lower()] = _operation(route, path, secured)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxinfer",
            "version": VERSION,
            "description": "Routes of OpenAI, Anthropic and ollama over one model. A field that is "
            "null counts as absent. Unknown fields are ignored unless the server runs with "
            "--strict-fields.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(documented, models, vocab_size),
            "responses": {
                _error_name(kind, status): _error(kind, status)
                for kind in (ErrorBody, AnthropicErrorBody, OllamaErrorBody)
                for status in ERRORS
            },
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of the server's --api-key values, if it has any.",
                },
                "anthropicKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same, as Anthropic's clients send it.",
                },
            },
        },
    }


_KEYS = ("apiKey", "anthropicKey")  # either
_REF = "#/components/schemas/{name}"


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _json(kind: type) -> dict[str, Any]:
    """A body that is this struct as JSON."""
    return {"application/json": {"schema": _ref(kind)}}


def _schemas(
    operations: Sequence[Route], models: Sequence[str], vocab_size: int | None
) -> dict[str, Any]:
    """The schemas of all structs that requests and responses consist of."""
    structs = {
        kind for one in operations for kind in (one.request, one.response, one.error, *one.events)
    }
    kinds = [kind for kind in structs if isinstance(kind, type)]
    kinds.sort(key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    requests = {one.request.__name__: one.request for one in operations if one.request is not None}
    inners = [inner for one in requests.values() for inner in one.nested.values()]
    requests |= {inner.__name__: inner for inner in inners}
    for name, schema in schemas.items():
        if name in requests:
            complete(schema, requests[name], models)
        for field, described in schema.get("properties", {}).items():
            if "description" not in described:
                described["description"] = description_of(name, field, is_request=name in requests)
    if vocab_size is not None:
        _bound_token_ids(schemas, vocab_size - 1)
    return schemas


def _operation(operation: Route, path: str, secured: bool) -> dict[str, Any]:
    names, segment = re.findall(r"{(\w+)}", path), {"type": "string", "minLength": 1}
    errors = {405, 431, 500, 503, *operation.errors}
    if path not in OPEN_PATHS:
        errors.add(401)
    if names:
        errors.add(404)
    if operation.request is not None:
        errors |= {400, 404, 408, 413, 415}
    if operation.events:
        errors.add(429)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": segment} for name in names),
            *(
                {"name": name, "in": "query", "schema": one}
                for name, one in operation.query.items()
            ),
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
                str(status): {
                    "$ref": f"#/components/responses/{_error_name(operation.error, status)}"
                }
                for status in sorted(errors)
            },
        },
        "security": [{name: []} for name in _KEYS] if secured and 401 in errors else [],
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.request)}
    return described


def _success(operation: Route) -> dict[str, Any]:
    """The response with status 200."""
    success: dict[str, Any] = {"description": operation.summary, "headers": _headers()}
    if operation.request is not None:
        about = "What the answer leaves out of the request, or does not enforce."
        success["headers"]["X-Jaxinfer-Warning"] = {
            "description": about,
            "schema": {"type": "string"},
        }
    content: dict[str, Any] = {}
    if isinstance(operation.response, str):
        kind = "string" if operation.response.startswith("text/") else "object"
        content[operation.response] = {"schema": {"type": kind}}
    elif operation.response is not None:
        content |= _json(operation.response)
    if operation.has_lines:
        lines = "Unless stream=false: lines, each an answer with the new part or an error."
        content[LINES.decode()] = {"schema": {"type": "string", "description": lines}}
    if operation.events:
        content["text/event-stream"] = {"schema": _event(operation)}
    if content:
        success["content"] = content
    return success


def _event(operation: Route) -> dict[str, Any]:
    """One event of a stream; a struct in its data is JSON."""
    texts: list[dict[str, Any]] = [
        {"contentMediaType": "application/json", "contentSchema": _ref(struct)}
        for struct in (*operation.events, operation.error)
    ]
    if operation.named_events:
        data = {"type": "string", "anyOf": texts}
        return object_schema({"event": {"type": "string"}, "data": data}, "event", "data") | {
            "description": "With stream=true: events whose names are the types of their data, "
            "the last one too if the answer fails midway.",
        }
    data = {"type": "string", "anyOf": [*texts, {"const": "[DONE]"}]}
    return object_schema({"data": data}, "data") | {
        "description": "With stream=true: an event for new tokens, then one whose data is [DONE]. "
        "A failure midway is an event with an error.",
    }


def _headers() -> dict[str, Any]:
    description = "The id of this request in the log."
    return {"X-Request-Id": {"description": description, "schema": {"type": "string"}}}


def _error_name(kind: type[msgspec.Struct], status: int) -> str:
    return f"{kind.__name__.removesuffix('Body')}{status}"


def _error(kind: type[msgspec.Struct], status: int) -> dict[str, Any]:
    """The response of an error."""
    headers = _headers()
    if status in (429, 503):
        headers["Retry-After"] = {
            "description": "Seconds to wait before trying again.",
            "schema": {"type": "integer", "minimum": 0},
        }
    return {"description": ERRORS[status], "headers": headers, "content": _json(kind)}


def _bound_token_ids(schema: Any, last: int) -> None:
    """Lower the bound of every list of token ids to the vocabulary's, in place."""
    if isinstance(schema, list):
        for inner in cast("list[Any]", schema):
            _bound_token_ids(inner, last)
    elif isinstance(schema, dict):
        for key, inner in cast("dict[str, Any]", schema).items():
            if key == "items" and inner == token_id():
                inner["maximum"] = last
            _bound_token_ids(inner, last)
