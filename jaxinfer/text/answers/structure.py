"""Structural tags that enforce calls: the form of a model's calls with the tools' schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD
from jaxinfer.text.answers.argument_types import types_of
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.answers.python_calls import is_python_name

_INDEX = "{index}"  # the number of a call


def calls_tag(
    calls: CallText, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> dict[str, Any]:
    """The structural tag (vLLM's and xgrammar's form) of an answer that is one call or several of
    these functions: OpenAI's ``tool_choice`` required, or a named function.
    """
    return {"format": _section(calls, functions, parallel=parallel)}


def strict_tag(
    calls: CallText, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> dict[str, Any]:
    """The structural tag of an answer that may call these functions: once it begins a call, a
    function's name follows, and with ``strict`` arguments of its schema.
    """
    section = _section(calls, functions, parallel=parallel, only_strict=True)
    if not calls.triggers:
        text = _sequence(calls.without_calls)
        return {"format": {"type": "or", "elements": [text, section]}}
    if calls.before:
        several = _several(calls, functions, parallel=parallel, only_strict=True)
        tags = [{"type": "tag", "begin": calls.before, "content": several, "end": calls.after}]
    else:
        tags = [_call(calls, function, only_strict=True) for function in functions]
    return {
        "format": {
            "type": "triggered_tags",
            "triggers": list(calls.triggers),
            "tags": tags,
            "stop_after_first": not parallel,
        }
    }


def _section(
    calls: CallText, functions: Sequence[Mapping[str, Any]], **options: bool
) -> dict[str, Any]:
    """All calls of an answer."""
    several = _several(calls, functions, **options)
    return _sequence(_constant(calls.before), [several], _constant(calls.after))


def _several(
    calls: CallText,
    functions: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    only_strict: bool = False,
) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_call(calls, function, only_strict=only_strict) for function in functions],
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(
    calls: CallText, function: Mapping[str, Any], *, only_strict: bool = False
) -> dict[str, Any]:
    """The tag of a call of one function. ``only_strict``: without ``strict`` in the function any
    arguments may follow.
    """
    name = function["name"]
    if calls.style == "pairs" and not calls.quotes and not is_python_name(name):
        raise RequestError(
            f"{FIELD}.structural_tag cannot be used: {name!r} is no name in Python, in whose "
            "syntax this model writes calls"
        )
    begin, index, rest = calls.begin.replace("{name}", name).partition(_INDEX)
    is_strict = function.get("strict") is True
    is_free = only_strict and not is_strict
    schema = {} if is_free else function.get("parameters") or {}
    how = {"function": name, "strict": is_strict}
    number = [{"type": "regex", "pattern": "[0-9]{1,4}"}, *_constant(rest)] if index else []
    match calls.style:
        case "tags":
            arguments = [{"type": "any_text"}] if is_free else _tags(calls, schema, how)
        case "pairs":
            if is_free:
                declared = (function.get("parameters") or {}).get("properties") or {}
                schema = {"properties": dict.fromkeys(declared, {})}
            arguments = [_pairs(calls, schema, how)]
        case _:
            arguments = [_json(schema, how)]
    parts, end = [*number, *arguments], calls.end
    if not parts:  # tags without arguments: a tag must have a content
        parts, end = _constant(end), ""
    return {"type": "tag", "begin": begin, "content": _sequence(parts), "end": end}


def _pairs(calls: CallText, schema: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as pairs of a key and a value."""
    return {
        "type": "arguments",
        "json_schema": dict(schema),
        "key_end": calls.key_end,
        "separator": calls.argument_separator,
        "quotes": list(calls.quotes),
        **how,
    }


def _json(schema: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON; they are an object, whatever the schema says of other types."""
    return {
        "type": "json_schema",
        "json_schema": {**schema, "type": "object"},
        "closed": True,
        **how,
    }


def _tags(
    calls: CallText, schema: Mapping[str, Any], how: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Arguments as tags, in the schema's order; the required ones must be there."""
    required = schema.get("required") or ()
    return [
        _argument(calls, name, one, schema, how, is_required=name in required)
        for name, one in (schema.get("properties") or {}).items()
    ]


def _argument(
    calls: CallText,
    name: str,
    schema: Any,
    parent: Mapping[str, Any],
    how: Mapping[str, Any],
    *,
    is_required: bool,
) -> dict[str, Any]:
    types = types_of(schema, parent)
    is_text = not types or "string" in types
    definitions = {key: parent[key] for key in ("$defs", "definitions") if key in parent}
    own = schema if isinstance(schema, Mapping) else {"enum": []} if schema is False else {}
    content: dict[str, Any] = {
        "type": "argument_text" if is_text else "json_schema",
        "json_schema": {**definitions, **own},
        "closed": True,
        "argument": name,
        **how,
    }
    if is_text:  # the marks of arguments are in no text that the schema limits
        before, _, _ = calls.argument_begin.partition("{name}")
        content["excludes"] = [before.strip(), calls.argument_end.strip()]
    begin = calls.argument_begin.replace("{name}", name)
    begin = begin.replace("{string}", "true" if is_text else "false")
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
