"""Errors in OpenAI's form: a status and ``{"error": {...}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from jaxinfer.core.errors import (
    ContextLengthError,
    EngineError,
    JaxinferError,
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
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


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
        """The JSON body. A stream that fails sends it as the data of its last event."""
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))
        )

    @property
    def response(self) -> Response:
        """The whole response."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


def api_error(error: JaxinferError, *, alive: bool = True) -> ApiError:
    """The ``ApiError`` for an error of the lower floors; ``alive``: whether the engine still runs.

    An invalid request is 400, with ``param`` if the error names a field or its message begins with
    one. All other errors are 500, or 503 if the engine has stopped.
    """
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, TaskError):
        return ApiError(400, str(error), param="model")
    if isinstance(error, (RequestError, TokenizerError)):
        return ApiError(400, str(error), param=_leading_field(str(error)))
    if isinstance(error, EngineError) and not alive:
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, str(error), code="engine_error")


def _leading_field(message: str) -> str | None:
    """The field path that a message begins with; None if that is no known field.

    For "messages[0].content must be ..." it is ``messages[0].content``.
    """
    match = _LEADING_FIELD.match(message)
    if match is None or match["field"] not in _ENGINE_FIELDS:
        return None
    return match[0].removeprefix("the ")
