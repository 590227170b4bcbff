"""Errors: a status, and a body in the form of the route's API, such as OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response
from starlette.types import Scope

from jaxinfer.core.errors import (
    ContextLengthError,
    EngineError,
    JaxinferError,
    QueueFullError,
    RequestError,
    TaskError,
    TokenizerError,
)
from jaxinfer.core.request import SamplingParams

ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {  # of other statuses: invalid_request_error
        401: "authentication_error",
        404: "not_found_error",
        408: "timeout_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
    }
)
ANTHROPIC_ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {  # of other statuses: invalid_request_error
        401: "authentication_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "api_error",
    }
)
ANTHROPIC_PATH = "/v1/messages"  # of the routes that have Anthropic's form, with those below it
OLLAMA_PATH = "/api"  # of those that have ollama's
# request fields that the messages of lower floors may begin with
_ENGINE_FIELDS = frozenset(SamplingParams.__struct_fields__) | {
    "cache_salt",
    "continue_final_message",
    "dimensions",
    "messages",
    "priority",
    "prompt",
    "tokens",
}
_LEADING_FIELD = re.compile(r"(?:the )?(?P<field>[a-z_]+)(?:\[[0-9]+\]|\.[a-z_]+)*")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The error object; ``param`` is the path of the invalid field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of a response with a status of 400 or more."""

    error: ErrorDetail


class AnthropicErrorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of an error that programs read; ``param`` is the path of the invalid field."""

    error_code: Annotated[str | UnsetType, Meta(description="The kind of error.")] = UNSET
    param: str | UnsetType = UNSET


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """The error object of Anthropic's API."""

    type: str
    message: str
    details: Annotated[
        AnthropicErrorFacts | UnsetType, Meta(description="The kind of error, and the field.")
    ] = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error on a path of Anthropic's API, and the data of an event ``error``."""

    error: AnthropicErrorDetail
    request_id: str  # also in the log


class OllamaErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an error on a path of ollama's API, and a line of a stream. Its clients read only
    the message.
    """

    error: str
    code: str | UnsetType = UNSET
    param: str | UnsetType = UNSET


class ApiError(Exception):
    """A response with an error status. ``type`` follows from the status unless it is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or ERROR_TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON body in OpenAI's form. A stream that fails sends it in its last event."""
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))
        )

    def anthropic_body(self, request_id: str) -> bytes:
        """The JSON body in Anthropic's form."""
        kind = ANTHROPIC_ERROR_TYPES.get(self.status, "invalid_request_error")
        facts = AnthropicErrorFacts(self.code or UNSET, self.param or UNSET)
        has_facts = self.code or self.param
        detail = AnthropicErrorDetail(kind, self.message, facts if has_facts else UNSET)
        return msgspec.json.encode(AnthropicErrorBody(detail, request_id))

    @property
    def ollama_body(self) -> bytes:
        """The JSON body in ollama's form."""
        body = OllamaErrorBody(self.message, self.code or UNSET, self.param or UNSET)
        return msgspec.json.encode(body)

    def response(self, scope: Scope) -> Response:
        """The whole response, in the form of the request's path."""
        body = self.body
        if is_anthropic(scope):
            body = self.anthropic_body(scope["state"]["request_id"])
        elif error_body(_path(scope)) is OllamaErrorBody:
            body = self.ollama_body
        return Response(body, self.status, self.headers, media_type="application/json")


def error_body(path: str) -> type[msgspec.Struct]:
    """The struct of an error on a path."""
    if is_below(path, ANTHROPIC_PATH):
        return AnthropicErrorBody
    return OllamaErrorBody if is_below(path, OLLAMA_PATH) else ErrorBody


def is_anthropic(scope: Scope) -> bool:
    """True if the path belongs to Anthropic's API."""
    return error_body(_path(scope)) is AnthropicErrorBody


def is_below(path: str, parent: str) -> bool:
    """True for the parent itself and the paths below it."""
    return f"{path}/".startswith(f"{parent}/")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def api_error(error: JaxinferError, *, alive: bool = True) -> ApiError:
    """The ``ApiError`` for an error of the lower floors; ``alive``: whether the engine still runs.

    An invalid request is 400, with ``param`` if the error names a field or its message begins with
    one, and 429 if it may be accepted later. All other errors are 500, or 503 if the engine has
    stopped.
    """
    if isinstance(error, QueueFullError):
        return queue_full(str(error))
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, TaskError):
        return ApiError(400, str(error), param="model")
    if isinstance(error, (RequestError, TokenizerError)):
        return ApiError(400, str(error), param=_leading_field(str(error)))
    if isinstance(error, EngineError) and not alive:
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, str(error), code="engine_error")


def queue_full(message: str) -> ApiError:
    """The error 429 for a request that may be accepted later."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


def _leading_field(message: str) -> str | None:
    """The field path that a message begins with; None if that is no known field.

    For "messages[0].content must be ..." it is ``messages[0].content``.
    """
    match = _LEADING_FIELD.match(message)
    if match is None or match["field"] not in _ENGINE_FIELDS:
        return None
    return match[0].removeprefix("the ")
