"""The parts of a tool call as it arrives, and how its name and arguments are written.

A call begins (``CallBegin``) once it is sure that the text is one: the name is that of a declared
tool (after a mark of calls any name, since agents tell a model which tools it has), and the
arguments have begun. Until then a reader raises ``ValueError`` for text that is no
call, and that text is content. Once begun, a call stays, since its beginning may have been sent: if
the model breaks off, the call ends with the arguments so far and is not whole. The same holds of
answers that are not streamed, so the two are equal.

JSON arguments are the text that the model wrote, byte for byte, valid or not; those in other forms
are written as ``argument_text`` writes values. Texts are passed on as they arrive, other arguments
one by one.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import regex

from jaxinfer.text.answers.source import Nesting, Source
from jaxinfer.text.answers.strict_json import strict_json

type Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each declared tool

JSON_STRINGS: Mapping[str, str] = MappingProxyType({'"': '"'})


class CallBegin(NamedTuple):
    """A call of a tool begins."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the begun call: together they are a JSON object as text."""

    text: str


class CallEnd(NamedTuple):
    """The call ends. ``is_whole`` False: the model has not ended it."""

    is_whole: bool


type CallPart = CallBegin | CallArguments | CallEnd
type Reading[T] = Generator[CallPart | None, None, T]  # None: it needs further text


def whole_call(name: str, arguments: str) -> Iterator[CallPart]:
    """The parts of a call all of whose text is there."""
    yield CallBegin(name)
    yield CallArguments(arguments)
    yield CallEnd(True)


def call_without_arguments(name: str) -> Iterator[CallPart]:
    """The parts of a call that is cut off before its arguments."""
    yield CallBegin(name)
    yield CallEnd(False)


def declared_name(
    text: str, tools: Schemas, patterns: Sequence[str] = (), *, is_marked: bool = False
) -> str:
    """The name of the tool that a text names: the text itself, or its group ``name`` in one of the
    ``patterns``. Raises ``ValueError`` if no such tool is declared; without tools, and after a mark
    of calls, any name counts.
    """
    found = [regex.fullmatch(one, text) for one in patterns]
    names = [*(match["name"] for match in found if match is not None), text]
    for name in reversed(names):
        if name in tools:
            return name
    if names[0] and (is_marked or not tools):
        return names[0]
    raise ValueError(f"{text!r} is no declared tool")


def argument_text(value: Any) -> str:
    """The value of an argument as JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # half of a surrogate pair has no bytes: it stays an escape
    return text if _has_bytes(text) else json.dumps(value)


def complete_arguments(text: str) -> dict[str, Any]:
    """The arguments that the text of a call has; of one that is cut off, or no JSON, those before
    the mistake. Newlines in strings, which JSON does not have, are no mistake.
    """
    mistake = len(text)
    for whole in (True, False):
        try:
            tried = text if whole else text[: _last_argument(text, mistake)] + "}"
            value = strict_json(tried, raw_controls=True)
        except json.JSONDecodeError as error:
            mistake = error.pos
            continue
        except ValueError:
            continue
        if isinstance(value, dict) and _has_bytes(json.dumps(value, ensure_ascii=False)):
            return cast("dict[str, Any]", value)
    return {}


def _last_argument(text: str, mistake: int) -> int:
    """Where the last argument before a position of the text ends."""
    source, last = Source(text, 1), 1
    source.end(is_cut=True)
    while True:
        nesting = Nesting(JSON_STRINGS, in_list=True)
        end = nesting.follow(source)
        if not nesting.is_over or end >= mistake:
            return last
        last, source.at = end, end + 1


def _has_bytes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
