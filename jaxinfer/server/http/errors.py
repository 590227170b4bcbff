"""What goes wrong, as OpenAI's clients read it: a status and ``{"error": {...}}``.

Owns: ``ApiError``, its JSON form, and how the engine's errors become one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from jaxinfer.core.errors import (
    ContextLengthError,
    EngineError,
    JaxinferError,
    RequestError,
    TokenizerError,
)
from jaxinfer.core.request import SamplingParams

ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout_error",
        413: "invalid_request_error",
        415: "invalid_request_error",
        429: "rate_limit_error",
        431: "invalid_request_error",
        500: "server_error",
        503: "server_error",
    }
)
# fields that the lower floors name first when they refuse a request
_NAMED_BELOW = frozenset(SamplingParams.__struct_fields__) | {
    "cache_salt",
    "continue_final_message",
    "messages",
    "priority",
    "prompt",
    "tokens",
}
_FIELD_FIRST = re.compile(r"(?:the )?(?P<field>[a-z_]+)(?:\[[0-9]+\]|\.[a-z_]+)*")


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong; ``param`` is the path of the field that is to blame."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is not 2xx. ``type`` follows from the status unless it is given."""

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
        """The JSON body; also the data of a stream's last event when it fails midway."""
        return error_body(self.message, type=self.type, param=self.param, code=self.code)


def error_body(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, type, param, code)))


def api_error(error: JaxinferError, *, alive: bool = True) -> ApiError:
    """The answer for an error of the lower floors; ``alive``: whether the engine goes on.

    A request's own fault is 400, with ``param`` where the error names a field or its message
    begins with one. The rest is 500, or 503 when the engine is dead.
    """
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, (RequestError, TokenizerError)):
        return ApiError(400, str(error), param=_param(str(error)))
    if isinstance(error, EngineError) and not alive:
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, str(error), code="engine_error")


def _param(message: str) -> str | None:
    """``messages[0].content`` of "messages[0].content must be ..."; None without a known field."""
    found = _FIELD_FIRST.match(message)
    if found is None or found["field"] not in _NAMED_BELOW:
        return None
    return found[0].removeprefix("the ")
