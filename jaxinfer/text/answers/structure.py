"""Structural tags that enforce calls: the form of a model's calls with the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.answers.values import types_of

_INDEX = "{index}"  # the number of a call


def calls_tag(
    calls: CallText, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> dict[str, Any]:
    """The structural tag (vLLM's and xgrammar's form) of an answer that is one call or several of
    these functions: OpenAI's ``tool_choice`` required, or a named function.
    """
    tags = [_call(calls, function) for function in functions]
    several = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"format": _sequence(_constant(calls.before), [several], _constant(calls.after))}


def _call(calls: CallText, function: Mapping[str, Any]) -> dict[str, Any]:
    """The tag of a call of one function."""
    begin, index, rest = calls.begin.replace("{name}", function["name"]).partition(_INDEX)
    schema = function.get("parameters") or {}
    number = [{"type": "regex", "pattern": "[0-9]{1,4}"}, *_constant(rest)] if index else []
    arguments = _tags(calls, schema) if calls.style == "tags" else [_json(schema)]
    parts, end = [*number, *arguments], calls.end
    if not parts:  # tags without arguments: a tag must have a content
        parts, end = _constant(end), ""
    return {"type": "tag", "begin": begin, "content": _sequence(parts), "end": end}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON; they are an object, whatever the schema says of other types."""
    return {"type": "json_schema", "json_schema": {**schema, "type": "object"}}


def _tags(calls: CallText, schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments as tags, in the schema's order; the required ones must be there."""
    required = schema.get("required") or ()
    return [
        _argument(calls, name, one, schema, is_required=name in required)
        for name, one in (schema.get("properties") or {}).items()
    ]


def _argument(
    calls: CallText, name: str, schema: Any, parent: Mapping[str, Any], *, is_required: bool
) -> dict[str, Any]:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    content: dict[str, Any]
    if isinstance(choices, list) and choices:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
        content = {"type": "or", "elements": [part for one in texts for part in _constant(one)]}
    elif not (types := types_of(schema)) or "string" in types:
        content = {"type": "any_text"}
    else:
        definitions = {key: parent[key] for key in ("$defs", "definitions") if key in parent}
        content = {"type": "json_schema", "json_schema": {**definitions, **schema}}
    begin = calls.argument_begin.replace("{name}", name)
    tag = {"type": "tag", "begin": begin, "content": content, "end": calls.argument_end}
    return {
        "type": "tags_with_separator",
        "tags": [tag],
        "separator": "",
        "at_least_one": is_required,
        "stop_after_first": True,
    }


def _constant(text: str) -> list[dict[str, Any]]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(*parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    elements = [dict(one) for part in parts for one in part]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
