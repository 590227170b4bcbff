"""Calls that a model writes as JSON, read as they arrive."""

from __future__ import annotations

import regex

from jaxinfer.text.answers.call_parts import (
    JSON_STRINGS,
    CallArguments,
    CallBegin,
    CallEnd,
    Reading,
    Schemas,
    call_without_arguments,
    declared_name,
    whole_call,
)
from jaxinfer.text.answers.source import Nesting, Source
from jaxinfer.text.answers.strict_json import strict_json
from jaxinfer.text.answers.values import read_calls

# a longer key or name is none, so that a search for its end takes little time
_KEY = regex.compile(r'\s*,?\s*("(?:[^"\\]|\\.){0,4000}+")\s*:', regex.DOTALL)
_FIRST_NAME = regex.compile(r'\{+\s*"(?:name|function)"\s*:\s*("(?:[^"\\]|\\.){0,4000}+")')
_LISTS = regex.compile(r"[\[\s]*")
_LIST_END = regex.compile(r"\s*\]")
_OBJECT = regex.compile(r"\s*\{")
_NEXT_OBJECT = regex.compile(r"\s*,\s*(?=\{)")
_NEXT_LINE = regex.compile(r"[^\S\n]*\n\s*(?=\{)")
_OBJECT_END = regex.compile(r"\s*\}")
_ANSWER_END = regex.compile(r"\s*(?:```\s*)?\Z")


def json_calls(source: Source, tools: Schemas, *, names_are_keys: bool = False) -> Reading[None]:
    """A call as an object, or several in a list or on lines of their own. ``names_are_keys``: the
    key of the arguments is the function's name.
    """
    call = _keyed_call if names_are_keys else _json_call
    opened = yield from source.expect(_LISTS)
    num_lists = opened[0].count("[")
    yield from call(source, tools)
    while (yield from source.read(_NEXT_OBJECT if num_lists else _NEXT_LINE)):
        yield from call(source, tools)
    for _ in range(num_lists):
        if not (yield from source.read(_LIST_END)):
            return


def _keyed_call(source: Source, tools: Schemas) -> Reading[None]:
    """An object whose one key is the name, and its value the arguments."""
    yield from source.expect(_OBJECT)
    key = yield from source.expect(_KEY)
    name = declared_name(str(strict_json(key[1])), tools, is_marked=source.is_marked)
    yield from json_arguments(source, name)
    yield from source.read(_OBJECT_END)


def _json_call(source: Source, tools: Schemas) -> Reading[None]:
    """An object with the keys ``name`` (or ``tool_name``) and ``arguments`` (or ``parameters``), in
    any order; it may be the value of the key ``function``.
    """
    name, held, is_sent, num_open = "", "", False, 1
    yield from source.expect(_OBJECT)
    while key := (yield from source.read(_KEY)):
        first = yield from source.skip_space()
        match strict_json(key[1]):
            case "name" | "tool_name" | "function" if first == '"' and not name:
                text = yield from _other_value(source)
                name = declared_name(str(strict_json(text)), tools, is_marked=source.is_marked)
            case "function" if first == "{":
                source.take(source.at + 1)
                num_open += 1
            case "arguments" | "parameters" if not is_sent and not held:
                held = yield from json_arguments(source, name)
                is_sent = bool(name)
            case _:
                yield from _other_value(source)
    takes_none = source.is_marked and name in tools and not tools[name].get("properties")
    if not (is_sent or held) and takes_none and (yield from source.skip_space()) == "}":
        held = "{}"  # models leave out the arguments of a function without any
    if not is_sent and held and name:
        yield from whole_call(name, held)
    elif not is_sent:
        if not name or not source.is_cut:
            raise ValueError("a call has no name or no arguments")
        yield from call_without_arguments(name)
    for _ in range(num_open):  # models forget the last one at times
        if not (yield from source.read(_OBJECT_END)):
            return


def json_arguments(source: Source, name: str) -> Reading[str]:
    """The arguments that begin here: an object, its text as a string, or null. If the name is not
    known yet (empty), they are returned instead of sent.
    """
    first = yield from source.skip_space()
    if first == "{" and name:
        yield CallBegin(name)
        yield from _sent_object(source)
        return ""
    if not first and source.is_cut and name:
        yield from call_without_arguments(name)
        return ""
    text = yield from source.value(Nesting(JSON_STRINGS, in_list=first != "{"))
    if first == '"':
        text = str(strict_json(text))
    elif text.strip() == "null":
        text = "{}"
    if not isinstance(strict_json(text), dict):
        raise ValueError("the arguments are no object")
    if name:
        yield from whole_call(name, text)
    return text


def _sent_object(source: Source) -> Reading[None]:
    """Send the text of an object as it arrives."""
    nesting = Nesting(JSON_STRINGS)
    while True:
        if text := source.take(nesting.follow(source)):
            yield CallArguments(text)
        if nesting.is_over or source.is_ended:
            yield CallEnd(nesting.is_over)
            return
        yield None


def _other_value(source: Source) -> Reading[str]:
    """A value that is not sent."""
    text = yield from source.value(Nesting(JSON_STRINGS, in_list=True))
    return text


def json_answer(source: Source, tools: Schemas) -> Reading[None]:
    """A whole answer that is a call, also within a fence and with its braces doubled. Text that
    begins with another name than a tool's is none at once.
    """
    nesting, begun = Nesting(JSON_STRINGS), ""
    if first := (yield from source.read(_FIRST_NAME)):
        declared_name(str(strict_json(first[1])), tools)
        begun = first[0]
        nesting.follow(Source(begun, 0))
    text = begun + (yield from source.value(nesting))
    yield from source.expect(_ANSWER_END)
    for tried in (text, text[1:-1], text.replace("{{", "{").replace("}}", "}")):
        try:
            (call,) = read_calls(tried, "json", {}, tools=tools)
        except ValueError:
            continue
        yield from whole_call(declared_name(call.name, tools), call.arguments)
        return
    raise ValueError("the object is no call")
