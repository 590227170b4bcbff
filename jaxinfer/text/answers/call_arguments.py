"""Calls whose arguments are no JSON: pairs in Python's syntax or a dialect of JSON, and tags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import regex

from jaxinfer.text.answers.argument_types import is_plain_text, typed, types_of
from jaxinfer.text.answers.call_elements import element_value
from jaxinfer.text.answers.call_parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Reading,
    Schemas,
    argument_text,
    declared_name,
)
from jaxinfer.text.answers.python_calls import is_python_name, read_python_value
from jaxinfer.text.answers.source import Nesting, Source
from jaxinfer.text.answers.strict_json import strict_json
from jaxinfer.text.answers.values import read_dialect

_LIST = regex.compile(r"\s*\[")
_LIST_END = regex.compile(r"\s*,?\s*\]")
_NAME = regex.compile(r"\s*([^\W\d][\w.]{0,4000}+)\s*\(")
_NEXT_NAME = regex.compile(r"\s*,\s*(?=[^\W\d])")
_COMMA = regex.compile(r"\s*,\s*")


@dataclass(frozen=True)
class PairForm:
    """The form of arguments that are pairs of a key and a value."""

    key: regex.Pattern[str]  # and the mark after it
    end: regex.Pattern[str]  # the mark after the last pair
    strings: Mapping[str, str]  # marks around strings
    read: Callable[[str], Any]  # the value that a text is; raises ``ValueError``
    texts: Mapping[str, str] = MappingProxyType({})  # marks around texts that have no escapes
    quoted: regex.Pattern[str] | None = None  # a text with other marks than those


_PYTHON = PairForm(
    key=regex.compile(r"\s*(?P<key>[^\W\d]\w{0,4000}+)\s*=(?!=)"),
    end=regex.compile(r"\s*\)"),
    strings=MappingProxyType({mark: mark for mark in ('"""', "'''", '"', "'")}),
    read=read_python_value,
)


_ENDS_VALUE = r"""(?=\s*(?:\}|,\s*[^\s"'{}\[\],:]+\s*:))"""  # the object ends, or a key follows


def _otherwise_quoted(ends: Collection[str]) -> regex.Pattern[str]:
    """A text as models write it though the dialect has other marks: in single quotes, within which
    there may be commas, brackets and apostrophes, or without the first mark of one of the ``ends``.
    """
    end = "|".join(map(regex.escape, ("'", *ends)))
    last = "|".join(map(regex.escape, ends))
    quoted = rf"'(?P<text>(?:\\.|(?!(?:{end}){_ENDS_VALUE}).)*+)(?:{end})"
    bare = rf"""(?P<bare>[^\s"'{{}}\[\],](?:(?!{last})[^"{{}}\[\],])*+)(?:{last}){_ENDS_VALUE}"""
    return regex.compile(f"{quoted}|{bare}" if ends else quoted, regex.DOTALL)


def dialect_form(args: Mapping[str, Any]) -> PairForm:
    """The form of a dialect of JSON; ``args`` are those of the reader ``json``."""
    texts = {str(begin): str(end) for begin, end in args.get("string_delims", ())}
    keys = [
        rf"{regex.escape(begin)}(?P<key>.{{0,4000}}?){regex.escape(end)}"
        for begin, end in (*texts.items(), ('"', '"'))
    ]
    if args.get("unquoted_keys"):
        keys.append(r'(?P<key>[^\s"{}\[\],:][^"{}\[\],:]{0,4000}?)')
    return PairForm(
        key=regex.compile(rf"\s*(?:{'|'.join(keys)})\s*:", regex.DOTALL),
        end=regex.compile(r"\s*\}"),
        strings={**texts, '"': '"'},
        read=lambda text: read_dialect(text, args),
        texts=texts,
        quoted=_otherwise_quoted((*texts.values(),)),
    )


class _Arguments:
    """Sends arguments one by one, as an object of JSON."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def key(self, key: str) -> Reading[None]:
        """Send the text before a value."""
        text = argument_text(key) + ": "
        if self._has_begun:
            yield CallArguments(", " + text)
            return
        self._has_begun = True
        yield CallBegin(self._name)
        yield CallArguments("{" + text)

    def end(self, *, is_whole: bool) -> Reading[None]:
        """Send the end; without arguments the object is empty."""
        text = "}" * is_whole
        if not self._has_begun:
            yield CallBegin(self._name)
            text = "{" + text
        if text:
            yield CallArguments(text)
        yield CallEnd(is_whole)


def python_calls(source: Source, tools: Schemas) -> Reading[None]:
    """A list of calls in Python's syntax."""
    yield from source.expect(_LIST)
    while True:
        found = yield from source.expect(_NAME)
        name = declared_name(found[1], tools, is_marked=source.is_marked)
        if not is_python_name(name):
            raise ValueError(f"{name!r} is no name in Python")
        yield from _pairs(source, name, _PYTHON)
        if not (yield from source.read(_NEXT_NAME)):
            break
    yield from source.read(_LIST_END)


def dialect_arguments(source: Source, name: str, form: PairForm) -> Reading[None]:
    """The arguments of a call as an object in a dialect of JSON."""
    first = yield from source.skip_space()
    if first == "{":
        source.take(source.at + 1)
    elif not (source.is_cut and not first):
        raise ValueError("the arguments are no object")
    yield from _pairs(source, name, form)


def _pairs(source: Source, name: str, form: PairForm) -> Reading[None]:
    """Arguments up to the mark after them."""
    arguments = _Arguments(name)
    try:
        while not (yield from source.read(form.end)):
            key = yield from source.expect(form.key)
            yield from _pair(source, key["key"], form, arguments)
            if not (yield from source.read(_COMMA)):
                yield from source.expect(form.end)
                break
    except ValueError:
        if not source.is_cut:
            raise
        yield from arguments.end(is_whole=False)
    else:
        yield from arguments.end(is_whole=True)


def _pair(source: Source, key: str, form: PairForm, arguments: _Arguments) -> Reading[None]:
    """One argument, whose key has been read."""
    yield from source.skip_space()
    for begin, end in form.texts.items():
        if (yield from source.read(regex.compile(regex.escape(begin)))):
            yield from arguments.key(key)
            yield from _sent_text(source, regex.compile(regex.escape(end)))
            return
    if form.quoted is not None and (found := (yield from source.read(form.quoted))):
        yield from arguments.key(key)
        yield CallArguments(argument_text(_unquoted(found)))
        return
    nesting = Nesting(form.strings, in_list=True)
    text = yield from source.value(nesting)
    is_ended = source.text[source.at : source.at + 1] == "," or form.end.match(
        source.text, source.at
    )
    if not is_ended:
        raise ValueError("no end follows the value")
    value = argument_text(form.read(text))
    yield from arguments.key(key)
    yield CallArguments(value)


def _unquoted(found: regex.Match[str]) -> Any:
    """The text of a value with other marks, with Python's escapes if it is a string of Python."""
    try:
        return read_python_value(found[0])
    except ValueError:
        groups = found.groupdict()
        return groups["text"] if groups["text"] is not None else groups["bare"].rstrip()


def tags(source: Source, name: str, args: Mapping[str, Any], schema: Any) -> Reading[None]:
    """Arguments as tags. ``args``: ``argument`` is the pattern of a tag before a value, with the
    groups ``key`` and, if it says whether the value is text, ``string``; ``value_end`` that after
    the value, in which ``{key}`` stands for its key, and ``call_end`` that after the last one. A
    model may leave out the last marks. ``stray``: marks at the end of a value that can be no part
    of it, unless it is text. ``elements``: the mark before the tags of elements in values.
    """
    tag = regex.compile(f"(?:{args['argument']})|(?P<end>{args['call_end']})", regex.DOTALL)
    stray = regex.compile(rf"(?:{args['stray']})\s*\Z") if "stray" in args else None
    arguments = _Arguments(name)
    yield from source.skip_space()
    found = yield from source.read(tag)
    if found is None and not source.is_cut:
        raise ValueError("neither an argument nor the end follows the name")
    while found is not None and found["end"] is None:
        is_text = found.groupdict().get("string") != "false" and "elements" not in args
        key = regex.escape(found["key"])
        value_end = regex.compile(args["value_end"].replace("{key}", key), regex.DOTALL)
        ends = yield from _tagged(
            *(source, found["key"], value_end, arguments, schema),
            is_text=is_text,
            stray=stray,
            elements=args.get("elements"),
        )
        if not ends and source.is_cut:
            found = None
            break
        _, found = yield from source.held_before(tag)
    yield from arguments.end(is_whole=found is not None or not source.is_cut)


def _tagged(
    source: Source,
    key: str,
    end: regex.Pattern[str],
    arguments: _Arguments,
    schema: Any,
    *,
    is_text: bool,
    stray: regex.Pattern[str] | None,
    elements: str | None,
) -> Reading[bool]:
    """One argument, whose tag has been read; False if the answer ends within it. ``is_text``: what
    the model says of it, which counts if the schema does not describe it. An empty value whose
    type has none is left out: so models write that there is no such argument.
    """
    listed = schema.get("properties")
    described = cast("Mapping[str, Any]", listed) if isinstance(listed, Mapping) else {}
    if is_plain_text(described[key], schema) if key in described else is_text:
        yield from arguments.key(key)
        return (yield from _sent_text(source, end))
    text, found = yield from source.held_before(end)
    if found is None and source.is_cut:
        return False
    if stray is not None:
        text = stray.sub("", text)
    types = types_of(described[key], schema) if key in described else ()
    if elements is not None:
        value = element_value(text, elements, described.get(key), schema)
        yield from arguments.key(key)
        yield CallArguments(argument_text(value))
        return found is not None
    if types and not text.strip() and not {"string", "null"} & {*types}:
        return found is not None
    value = typed(text, described[key], schema) if key in described else _json_or_text(text)
    yield from arguments.key(key)
    yield CallArguments(argument_text(value))
    return found is not None


def _sent_text(source: Source, end: regex.Pattern[str]) -> Reading[bool]:
    """Send a text as it arrives, as a string of JSON; it stays open if it is cut off. Returns
    False if the answer ends within it.
    """
    before = '"'
    while True:
        text, found = source.before(end)
        is_over = found is not None or (source.is_ended and not source.is_cut)
        if sent := before + argument_text(text)[1:-1] + '"' * is_over:
            yield CallArguments(sent)
        before = ""
        if found is not None or source.is_ended:
            return found is not None
        yield None


def _json_or_text(text: str) -> Any:
    try:
        return strict_json(text)
    except ValueError:
        return text
