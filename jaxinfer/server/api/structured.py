"""The form of an answer: response_format, structured_outputs, and guided_* of older vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import (
    FIELD,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    StructuredOutputsParams,
)
from jaxinfer.server.http.errors import ApiError

GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
RegexText = Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_BYTES)]
Choices = Annotated[tuple[GrammarText, ...], Meta(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``response_format.json_schema``. Answers follow it with or without ``strict``."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """``response_format``: text, json_object, json_schema, or vLLM's structural_tag."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class Form(NamedTuple):
    """The form of an answer, and the path of the request's field that sets it."""

    params: StructuredOutputsParams
    field: str


GUIDED: Mapping[str, str] = MappingProxyType(
    {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }
)
_WITH_MARKS = ("grammar", "structural_tag")
_FORMATS = "text, json_object, json_schema and structural_tag"


def form_of(
    response_format: ResponseFormat | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],  # the fields of ``GUIDED``
    whitespace_pattern: str | None,
) -> tuple[str, Mapping[str, Any]] | None:
    """The path of the field that sets the form of the answers, and the form's parameters; None for
    plain text. Raises ``ApiError``.
    """
    if response_format is not None and response_format.type == "text":
        response_format = None
    named = {**guided, FIELD: structured_outputs, "response_format": response_format}
    given = [name for name, value in named.items() if value is not None]
    if not given:
        return None
    field = given[0]
    if len(given) > 1:
        raise ApiError(400, f"{given[1]} and {field} are both set; leave one out", param=given[1])
    if response_format is not None:
        return _of_format(response_format)
    if structured_outputs is not None:
        return field, structured_outputs
    return field, {GUIDED[field]: guided[field], "whitespace_pattern": whitespace_pattern}


def has_whole_form(chosen: tuple[str, Mapping[str, Any]] | None) -> bool:
    """True if a form that ``form_of`` returned is one of the whole text. Grammars and structural
    tags may have the model's own marks of calls and thoughts in them.
    """
    return chosen is not None and not any(chosen[1].get(kind) for kind in _WITH_MARKS)


def form_with(fields: Mapping[str, Any], field: str) -> Form:
    """The form with these parameters, which ``field`` sets; raises ``ApiError`` naming it."""
    try:
        params = StructuredOutputsParams.of(fields)
    except RequestError as error:
        raise with_field(ApiError(400, str(error), param=FIELD), field) from None
    assert params is not None
    return Form(params, field)


def with_field(error: ApiError, field: str) -> ApiError:
    """An error about ``structured_outputs`` as one about the field that the client has sent."""
    if field == FIELD or error.param is None or not error.param.startswith(FIELD):
        # the message begins with the path of the part that is wrong
        path = error.message.partition(" ")[0]
        error.param = path if path.startswith(FIELD) else error.param
        return error
    _, _, words = error.message.partition(" ")
    error.message, error.param = f"{field} {words}", field
    return error


def _of_format(given: ResponseFormat) -> tuple[str, dict[str, Any]]:
    """The path and the parameters of a ``response_format``."""
    match given.type:
        case "json_object":
            return "response_format", {"json_object": True}
        case "json_schema":
            schema = given.json_schema
            if schema is None:
                raise ApiError(
                    400,
                    "response_format.json_schema is required",
                    param="response_format.json_schema",
                )
            return "response_format.json_schema.schema", {"json": schema.schema}
        case "structural_tag":
            tag = {"structures": given.structures, "triggers": given.triggers}
            tag = {"format": given.format} if given.structures is None else tag
            return "response_format", {"structural_tag": tag}
        case kind:
            raise ApiError(
                400,
                f"response_format.type {kind[:40]!r} is unknown; {_FORMATS} are known",
                param="response_format.type",
            )
