"""Structural tags that enforce calls: the form of a model's calls with the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, KINDS, StructuredOutputsParams
from jaxinfer.text.answers.argument_types import types_of
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.answers.python_calls import is_python_name
from jaxinfer.text.grammar.lark_regex import lark_as_regex
from jaxinfer.text.grammar.schema import part_of
from jaxinfer.text.grammar.tags import format_of

_INDEX = "{index}"  # the number of a call

_WORDS = ("description", "title", "$comment")
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"additionalProperties": False})


def calls_tag(
    calls: CallText, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> dict[str, Any]:
    """The structural tag (vLLM's and xgrammar's form) of an answer that is one call or several of
    these functions: OpenAI's ``tool_choice`` required, or a named function.
    """
    return {"format": _section(calls, functions, parallel=parallel)}


def calls_or(
    form: Mapping[str, Any],
    calls: CallText,
    functions: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
) -> dict[str, Any]:
    """The structural tag of an answer that calls these functions, or whose text has the ``form``
    of a structural tag.
    """
    return _either(form, calls, functions, parallel=parallel, spaced=False)


def strict_tag(
    calls: CallText, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> dict[str, Any]:
    """The structural tag of an answer that may call these functions: once it begins a call, a
    function's name follows, and with ``strict`` arguments of its schema.
    """
    if calls.is_generic:
        return _either(_answer(calls), calls, functions, parallel=parallel, spaced=True)
    if not calls.triggers:
        without = _sequence(calls.without_calls)
        return _either(without, calls, functions, parallel=parallel, spaced=True)
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


def as_element(form: StructuredOutputsParams) -> Mapping[str, Any]:
    """A form of a text as a part of a structural tag; raises ``RequestError`` for a grammar that is
    no regular expression.
    """
    match form.kind:
        case "json":
            schema = json.loads(form.json or "{}")
            return {"type": "json_schema", "json_schema": {} if schema is True else schema}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "choice":
            texts = [part for one in form.choice or () for part in _constant(one)]
            return {"type": "or", "elements": texts}
        case "structural_tag":
            return format_of(json.loads(form.structural_tag or "{}"))
        case _:
            try:
                return {"type": "regex", "pattern": lark_as_regex(form.grammar or "")}
            except ValueError as error:
                raise RequestError(
                    f"{FIELD}.grammar cannot be combined with tools: {error}; leave the tools out, "
                    "set tool_choice to none, or use a schema, a regex or Lark without recursion"
                ) from None


def form_of_tag(
    tag: Mapping[str, Any], content: StructuredOutputsParams | None
) -> StructuredOutputsParams:
    """The form with this structural tag, and the options of the ``content``'s own."""
    if content is None:
        return StructuredOutputsParams(structural_tag=cast("Any", tag))
    kinds = dict.fromkeys(KINDS)
    return msgspec.structs.replace(content, **{**kinds, "structural_tag": tag})


def _answer(calls: CallText) -> dict[str, Any]:
    """An answer to the user that is a JSON string between marks."""
    marks = json.loads(f"{calls.answer_begin}null{calls.answer_end}")
    schema = _schema_of(marks, {"type": "string"})
    return {"type": "json_schema", "json_schema": schema, "closed": True, "spaced": True}


def _either(
    form: Mapping[str, Any],
    calls: CallText,
    functions: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    spaced: bool,
) -> dict[str, Any]:
    """The structural tag of the ``form`` or calls."""
    options = {"parallel": parallel, "only_strict": not calls.is_generic, "spaced": spaced}
    return {"format": {"type": "or", "elements": [form, _section(calls, functions, **options)]}}


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
    spaced: bool = True,
) -> dict[str, Any]:
    how = {"only_strict": only_strict, "spaced": spaced}
    return {
        "type": "tags_with_separator",
        "tags": [_call(calls, function, **how) for function in functions],
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": calls.is_generic or not parallel,
    }


def _call(
    calls: CallText,
    function: Mapping[str, Any],
    *,
    only_strict: bool = False,
    spaced: bool = True,
) -> dict[str, Any]:
    """The tag of a call of one function. ``only_strict``: without ``strict`` in the function any
    arguments may follow. ``spaced``: a call that is a whole JSON object has the blanks that models
    write, and no others. llguidance cannot follow two schemas with other blanks at one place.
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
    schema = {} if is_free else _without_words(function.get("parameters") or _NO_PARAMETERS)
    how = {"function": name, "strict": is_strict}
    if begin.startswith("{") and not calls.triggers:
        # as a schema, since the answer may be other JSON: llguidance's lexer would take the
        # beginning of that for the text around the arguments
        written = json.loads(f"{begin}null{calls.end}")
        schema = _schema_of(written, {**schema, "type": "object"})
        form = {"type": "json_schema", "json_schema": schema, "closed": True, "spaced": spaced}
        return {**form, **how}
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


def _schema_of(value: Any, inner: Mapping[str, Any], where: str = "#") -> dict[str, Any]:
    """The schema of this JSON value alone, with what has the schema ``inner`` in the place of null;
    ``where`` is its place in the whole.
    """
    if value is None:
        return _moved(inner, where)
    if not isinstance(value, dict):
        return {"const": value}
    entries = cast("dict[str, Any]", value)
    places = {key: f"{where}/properties/{key}" for key in entries}
    return {
        "type": "object",
        "properties": {key: _schema_of(one, inner, places[key]) for key, one in entries.items()},
        "required": list(entries),
        "additionalProperties": False,
    }


def _without_words(schema: Any) -> Any:
    """A schema without descriptions, which agents write at length and grammars do not need."""
    if isinstance(schema, list):
        return [_without_words(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: one if key in ("enum", "const") else _without_words(one)
        for key, one in cast("Mapping[str, Any]", schema).items()
        if not (key in _WORDS and isinstance(one, str))  # a property may have such a name
    }


def _moved(schema: Any, where: str) -> Any:
    """A schema whose references to its own parts hold at another place of a larger one."""
    if isinstance(schema, list):
        return [_moved(one, where) for one in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    entries = cast("Mapping[str, Any]", schema)
    moved = {key: _moved(one, where) for key, one in entries.items()}
    ref = entries.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = where + ref[1:]
    return moved


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
    own = schema if isinstance(schema, Mapping) else {"enum": []} if schema is False else {}
    content: dict[str, Any] = {
        "type": "argument_text" if is_text else "json_schema",
        "json_schema": part_of(parent, own),
        "closed": True,
        "argument": name,
        **how,
    }
    if is_text:  # the marks of arguments are in no text that the schema limits
        before, _, _ = calls.argument_begin.partition("{name}")
        end, _, _ = calls.argument_end.partition("{name}")
        content["excludes"] = [before.strip(), end.strip()]
    begin = calls.argument_begin.replace("{name}", name)
    begin = begin.replace("{string}", "true" if is_text else "false")
    end = calls.argument_end.replace("{name}", name)
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
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
