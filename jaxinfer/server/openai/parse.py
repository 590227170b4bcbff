"""A body becomes a request, or an error that names the field.

Owns: JSON, wording, the paths of fields, unknown and unsupported fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.fields import PATTERNS, StreamOptions, refused
from jaxinfer.server.openai.schema import AnyRequest

MAX_LOCATED_CHARACTERS = 1 << 17  # of a body that is no JSON, to look for the bad field: 60 ms
MAX_NAMES_TOLD = 16  # unknown fields that an error or the log spells out
MAX_NAME_CHARACTERS = 64
MAX_DIGITS = 32  # of a number that an error repeats

_NOUNS: Mapping[str, str] = MappingProxyType(
    {
        "int": "an integer",
        "float": "a number",
        "str": "a string",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
        "null": "null",
    }
)
_GOT: Mapping[type, str] = MappingProxyType(
    {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
)
# msgspec's messages: "Expected `int`, got `str` - at `$.max_tokens`" and the like
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_TYPES = re.compile(r"Expected `(?P<types>[^`]*)`, got `.*`")
_RANGE = re.compile(r"Expected `(?:int|float)` (?P<sign>>=|>|<=|<) (?P<bound>\S+)")
_LENGTH = re.compile(r"Expected `(?P<type>\w+)` of length (?P<sign>>=|<=) (?P<bound>\d+)")
_PATTERN = re.compile(r"Expected `str` matching regex '(?P<pattern>.*)'")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_STEPS = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_SIGNS: Mapping[str, str] = MappingProxyType(
    {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
)
_UNITS: Mapping[str, str] = MappingProxyType({"str": "character", "array": "item", "object": "key"})


type _Link = tuple[_Link, str] | None  # where a value lies: its container's place, and the step


class Parsed[T](NamedTuple):
    """A request, and the names of the fields that nothing here knows (the first few, clipped)."""

    request: T
    unknown: tuple[str, ...]


def parse[T: AnyRequest](body: bytes, kind: type[T], *, strict: bool = False) -> Parsed[T]:
    """The request of type ``kind`` that a JSON ``body`` is.

    A field that is null counts as absent, and 2.0 as an integer. ``strict`` refuses unknown fields.
    Raises ``ApiError`` (400) with the path of the field to blame in ``param``.
    """
    given = _decode(body)
    if not isinstance(given, dict):
        raise refused(None, f"the body must be a JSON object, got {_GOT[type(given)]}")
    named = cast("dict[str, Any]", given)
    _refuse_unsupported(named, kind)
    fields = {name: _whole(value) for name, value in named.items() if value is not None}
    unknown = _unknown(fields, kind)
    if strict and unknown:
        raise refused(unknown[0], f"unknown fields: {', '.join(unknown)}; leave them out")
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _worded(str(error), fields) from None
    request.check()
    return Parsed(request, unknown)


def _decode(body: bytes) -> Any:
    """The JSON value of a body."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise refused(None, "the body is nested too deeply; send flatter JSON") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _undecodable(body, str(error)) from None


def _undecodable(body: bytes, reason: str) -> ApiError:
    """What is wrong with a body that is not strict JSON."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return refused(None, f"the body is not UTF-8 (byte {error.start}); send UTF-8")
    found = _unspeakable(text) if len(text) <= MAX_LOCATED_CHARACTERS else None
    if found is None:
        why = reason.partition(" - at ")[0].removeprefix("JSON is malformed: ").lower()
        return refused(None, f"the body is not valid JSON: {why}")
    path, value = found
    what = "a finite number" if isinstance(value, float) else "text without half surrogate pairs"
    return refused(path or None, f"{path or 'the body'} must be {what}")


def _unspeakable(text: str) -> tuple[str, float | str] | None:
    """The first NaN, infinity or half surrogate pair of a body, and its path.

    Strict JSON has none of them, but clients do send them, and Python's own parser reads them.
    """
    try:
        todo: list[tuple[Any, _Link]] = [(json.loads(text), None)]
    except (ValueError, RecursionError):
        return None  # it is no JSON for that parser either
    while todo:
        value, link = todo.pop()
        if isinstance(value, dict):
            items = list(cast("dict[str, Any]", value).items())
            if odd := next((key for key, _ in items if not _speakable(key)), None):
                return _path(link), odd
            todo += [(inner, (link, f".{key}")) for key, inner in reversed(items)]
        elif isinstance(value, list):
            inners = list(enumerate(cast("list[Any]", value)))
            todo += [(inner, (link, f"[{index}]")) for index, inner in reversed(inners)]
        elif not _speakable(value):
            return _path(link), value
    return None


def _path(link: _Link) -> str:
    """The path that a chain of steps makes, clipped."""
    steps: list[str] = []
    while link is not None:
        link, step = link
        steps.append(step)
    return "".join(reversed(steps)).removeprefix(".")[:MAX_NAME_CHARACTERS]


def _speakable(value: Any) -> bool:
    """Whether strict JSON in UTF-8 can hold this leaf."""
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unsupported(given: dict[str, Any], kind: type[AnyRequest]) -> None:
    for name, neutral in kind.unsupported.items():
        if name in given and not any(_same(given[name], value) for value in neutral):
            raise refused(name, f"{name} is not supported; leave it out")


def _same(given: Any, neutral: Any) -> bool:
    return type(given) is type(neutral) and given == neutral


def _whole(value: Any, num_levels: int = 2) -> Any:
    """A field's value with 2.0 as 2, also in lists: to JSON they are one number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if num_levels and isinstance(value, list):
        items = cast("list[Any]", value)
        if not {float, list}.isdisjoint(map(type, items)):  # a prompt's ids: none, in 20 us
            return [_whole(item, num_levels - 1) for item in items]
    return cast("Any", value)


def _unknown(fields: dict[str, Any], kind: type[AnyRequest]) -> tuple[str, ...]:
    known = {*kind.__struct_fields__, *kind.unsupported, *kind.ignored}
    names = [name for name in fields if name not in known]
    options = fields.get("stream_options")
    if isinstance(options, dict) and "stream_options" in known:
        known = {*StreamOptions.__struct_fields__, *StreamOptions.ignored}
        given = cast("dict[str, Any]", options)
        names += [
            f"stream_options.{name}" for name in given.keys() - known if given[name] is not None
        ]
    names.sort()
    return tuple(name[:MAX_NAME_CHARACTERS] for name in names[:MAX_NAMES_TOLD])


def _worded(message: str, fields: dict[str, Any]) -> ApiError:
    """msgspec's message in plain words, with the path of the field."""
    place = _PLACE.fullmatch(message)
    assert place is not None  # the pattern takes any text
    what, path = place["what"], (place["path"] or "").lstrip(".")
    if found := _MISSING.fullmatch(what):
        missing = f"{path}.{found['field']}" if path else found["field"]
        return refused(missing, f"{missing} is required")
    name, value = path, ...
    if place["is_key"]:
        name = f"each key of {path}"
    elif path.endswith("[...]"):  # somewhere in an object; msgspec does not say where
        path = path.removesuffix("[...]")
        name = f"each value of {path}"
    else:
        value = _value_at(fields, path)
    demand, got = _demand(what, value)
    return refused(path, f"{name} must {demand}{f', got {got}' if got else ''}")


def _demand(what: str, value: Any) -> tuple[str, str | None]:
    """What msgspec expected, and what came instead; ``value`` is ... where it is not known."""
    if found := _TYPES.fullmatch(what):
        nouns = [_NOUNS[kind] for kind in found["types"].split(" | ") if kind != "null"]
        return f"be {' or '.join(nouns)}", _GOT.get(type(value))
    if found := _RANGE.fullmatch(what):
        spelt = str(value) if isinstance(value, (int, float)) else ""
        bound = found["bound"].removesuffix(".0")
        return f"be {_SIGNS[found['sign']]} {bound}", spelt if len(spelt) <= MAX_DIGITS else None
    if found := _LENGTH.fullmatch(what):
        count, unit = int(found["bound"]), _UNITS[found["type"]]
        size = str(len(value)) if isinstance(value, Sized) else None
        return f"have {_SIGNS[found['sign']]} {count} {unit}{'' if count == 1 else 's'}", size
    found = _PATTERN.fullmatch(what)
    assert found is not None, what  # the structs have no other constraints
    return f"be {PATTERNS[found['pattern']]}", None


def _value_at(fields: dict[str, Any], path: str) -> Any:
    value: Any = fields
    for step in _STEPS.finditer(f".{path}"):
        value = value[step["key"]] if step["key"] is not None else value[int(step["index"])]
    return value
