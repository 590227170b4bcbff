"""Reads the calls in a field of an answer, in the form that the field declares, as they arrive."""

from __future__ import annotations

from collections.abc import Mapping

import regex

from jaxinfer.text.answers.call_arguments import (
    dialect_arguments,
    dialect_form,
    python_calls,
    tags,
)
from jaxinfer.text.answers.call_json import json_answer, json_arguments, json_calls
from jaxinfer.text.answers.call_parts import Reading, Schemas, declared_name, whole_call
from jaxinfer.text.answers.source import Nesting, Source
from jaxinfer.text.answers.template import Field
from jaxinfer.text.answers.values import read_calls

_NEVER = regex.compile(r"(?!)")
_DIALECT = frozenset({"string_delims", "unquoted_keys"})


def call_parts(
    source: Source, field: Field, captures: Mapping[str, str], tools: Schemas
) -> Reading[None]:
    """The parts of the calls in a field, up to the mark after them. ``captures``: the groups of the
    text that opened the field. Raises ``ValueError`` where the text is no call.
    """
    args, name = field.reader_args, ""
    source.is_marked = bool("".join(source.unsent).strip())
    if "name" in captures:
        names = args.get("names", ())
        name = declared_name(captures["name"], tools, names, is_marked=source.is_marked)
    is_named = bool(name) and field.has_named_arguments
    match field.reader:
        case "tags":
            yield from tags(source, name, args, tools.get(name, {}))
        case "python-call-list" if field.transform is None:
            yield from python_calls(source, tools)
        case "json-answer":
            yield from json_answer(source, tools)
        case "json" if is_named and not args.keys() - _DIALECT - {"names"}:
            if args.keys() & _DIALECT:
                yield from dialect_arguments(source, name, dialect_form(args))
            else:
                yield from json_arguments(source, name)
        case "json" if field.transform is None and not args.keys() - {"names_are_keys"}:
            names_are_keys = bool(args.get("names_are_keys"))
            yield from json_calls(source, tools, names_are_keys=names_are_keys)
        case _:
            yield from _collected(source, field, captures, tools)
            return
    if field.ending is not None:
        yield from _closing(source, field.ending)


def _closing(source: Source, ending: regex.Pattern[str]) -> Reading[None]:
    """Leave out the mark after a call, also if the answer ends within it."""
    yield from source.read(ending)
    if source.is_ended and ending.match(source.text, source.at, partial=True):
        source.take(len(source.text))


def _collected(
    source: Source, field: Field, captures: Mapping[str, str], tools: Schemas
) -> Reading[None]:
    """Calls in a form of the model's own template, which are read when they are whole."""
    if field.reader == "json":
        strings = {str(a): str(b) for a, b in field.reader_args.get("string_delims", ())}
        text = yield from source.value(Nesting({**strings, '"': '"'}))
        found = (yield from source.read(field.ending)) if field.ending is not None else None
    else:
        end = _NEVER if field.close is None else field.close.pattern
        text, found = yield from source.held_before(end)
    if source.is_cut and found is None:
        raise ValueError("the call is cut off")
    groups = {} if found is None else found.groupdict()
    calls = read_calls(
        text,
        field.reader,
        field.reader_args,
        transform=field.transform,
        transform_each=field.transform_each,
        captures={**captures, **{key: one for key, one in groups.items() if one is not None}},
        tools=tools,
    )
    for call in calls:
        declared_name(call.name, tools)
    for call in calls:
        yield from whole_call(call.name, call.arguments)
