"""Parses a body into a request, or raises an error that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from jaxinfer.server.api.fields import (
    AnyRequest,
    RequestPart,
    StreamOptions,
    field_error,
    pattern_text,
)
from jaxinfer.server.http.errors import ApiError

# of a body that is not JSON, in which the invalid field is looked for: 60 ms
MAX_LOCATED_CHARACTERS = 1 << 17
# Lists and objects in a body: an empty one of 2 bytes takes up to 64 in memory. The longest
# conversations have some 50,000.
MAX_CONTAINERS = 250_000
MAX_NAMES_LISTED = 16  # unknown fields that an error or the log lists
MAX_NAME_CHARACTERS = 64
NO_TEXT = ("image", "document", "container_upload")  # types of parts of a message
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
_UNKNOWN = re.compile(r"Invalid value (?P<value>.*)", re.DOTALL)  # of a tag, such as a type
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_STEPS = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # in JSON
_SIGNS: Mapping[str, str] = MappingProxyType(
    {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
)
_UNITS: Mapping[str, str] = MappingProxyType({"str": "character", "array": "item", "object": "key"})


class Parsed[T](NamedTuple):
    """A request, and the names of its unknown fields (the first few, shortened)."""

    request: T
    unknown: tuple[str, ...]


def parse[T: AnyRequest](body: bytes, kind: type[T], *, strict: bool = False) -> Parsed[T]:
    """Parse a JSON ``body`` into a request of type ``kind``.

    A field that is null counts as absent, and 2.0 as an integer. ``strict`` refuses unknown fields.
    Raises ``ApiError`` (400) with the path of the invalid field in ``param``.
    """
    given = _decode(body)
    if not isinstance(given, dict):
        raise field_error(None, f"the body must be a JSON object, got {_GOT[type(given)]}")
    named = cast("dict[str, Any]", given)
    fields = _prepared(named, kind)
    names = _unknown(fields, kind)
    unknown = tuple(name[:MAX_NAME_CHARACTERS] for name in names[:MAX_NAMES_LISTED])
    if strict and unknown:
        raise field_error(unknown[0], f"unknown fields: {', '.join(unknown)}; leave them out")
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _readable_error(str(error), fields) from None
    request.check()
    return Parsed(request, unknown)


def _decode(body: bytes) -> Any:
    """The JSON value of a body."""
    if (
        _num_brackets(body) > MAX_CONTAINERS
        and _num_brackets(_TEXT.sub(b"", body)) > MAX_CONTAINERS
    ):
        message = f"the body has more than {MAX_CONTAINERS} lists and objects; send fewer"
        raise field_error(None, message)
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise field_error(None, "the body is nested too deeply; send flatter JSON") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _decoding_error(body, str(error)) from None


def _num_brackets(body: bytes) -> int:
    """How many lists and objects JSON without brackets in its texts has."""
    return body.count(b"[") + body.count(b"{")


def _decoding_error(body: bytes, reason: str) -> ApiError:
    """The error for a body that is not strict JSON."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return field_error(None, f"the body is not UTF-8 (byte {error.start}); send UTF-8")
    found = _first_unencodable(text) if len(text) <= MAX_LOCATED_CHARACTERS else None
    if found is None:
        why = reason.partition(" - at ")[0].removeprefix("JSON is malformed: ").lower()
        return field_error(None, f"the body is not valid JSON: {why}")
    path, value = found[0].removeprefix(".")[:MAX_NAME_CHARACTERS], found[1]
    what = "a finite number" if isinstance(value, float) else "text without half surrogate pairs"
    return field_error(path or None, f"{path or 'the body'} must be {what}")


def _first_unencodable(text: str) -> tuple[str, float | str] | None:
    """The first NaN, infinity or unpaired surrogate in a body, and its path.

    Strict JSON has none of them, but clients do send them, and Python's own parser accepts them.
    """
    try:
        todo: list[tuple[str, Any]] = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return None  # Python's parser does not accept it either
    while todo:
        path, value = todo.pop()
        path = path[: MAX_NAME_CHARACTERS + 1]
        if isinstance(value, dict):
            items = list(cast("dict[str, Any]", value).items())
            if unencodable := next((key for key, _ in items if not _is_encodable(key)), None):
                return path, unencodable
            todo += [(f"{path}.{key}", inner) for key, inner in reversed(items)]
        elif isinstance(value, list):
            inners = list(enumerate(cast("list[Any]", value)))
            todo += [(f"{path}[{index}]", inner) for index, inner in reversed(inners)]
        elif not _is_encodable(value):
            return path, value
    return None


def _is_encodable(value: Any) -> bool:
    """True if strict JSON in UTF-8 can represent this leaf."""
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _prepared(given: dict[str, Any], kind: type[RequestPart], path: str = "") -> dict[str, Any]:
    """The fields that are not null, with integers; refuses fields that are not supported."""
    _refuse_unsupported(given, kind, path)
    fields = {name: _with_integers(value) for name, value in given.items() if value is not None}
    for name, inner in kind.nested.items():
        if isinstance(value := fields.get(name), dict):
            fields[name] = _prepared(cast("dict[str, Any]", value), inner, f"{path}{name}.")
    return fields


def _refuse_unsupported(given: dict[str, Any], kind: type[RequestPart], path: str) -> None:
    for name, neutral in kind.unsupported.items():
        # the types too, since 1 == True
        same = (type(given[name]) is type(one) and given[name] == one for one in neutral)
        if name in given and not any(same):
            error = field_error(path + name, f"{path}{name} is not supported; leave it out")
            error.code = kind.unsupported_codes.get(name)
            raise error


def _with_integers(value: Any, num_levels: int = 2) -> Any:
    """A field's value with 2.0 as 2, also in lists: JSON has one type of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if num_levels and isinstance(value, list):
        items = cast("list[Any]", value)
        # a prompt's ids contain neither; the check takes 20 us
        if not {float, list}.isdisjoint(map(type, items)):
            return [_with_integers(item, num_levels - 1) for item in items]
    return cast("Any", value)


def _unknown(fields: dict[str, Any], kind: type[RequestPart]) -> list[str]:
    """The names of fields that no struct has, sorted."""
    known = {*kind.__struct_fields__, *kind.unsupported, *kind.ignored}
    names = [name for name in fields if name not in known]
    options = fields.get("stream_options")
    if isinstance(options, dict) and "stream_options" in known:
        known = {*StreamOptions.__struct_fields__, *StreamOptions.ignored}
        given = cast("dict[str, Any]", options)
        names += [
            f"stream_options.{name}" for name in given.keys() - known if given[name] is not None
        ]
    for field, inner in kind.nested.items():
        if isinstance(options := fields.get(field), dict):
            names += [f"{field}.{name}" for name in _unknown(cast("Any", options), inner)]
    return sorted(names)


def _readable_error(message: str, fields: dict[str, Any]) -> ApiError:
    """msgspec's error in plain words, with the path of the field."""
    place = _PLACE.fullmatch(message)
    assert place is not None  # the pattern takes any text
    what, path = place["what"], (place["path"] or "").lstrip(".")
    if found := _MISSING.fullmatch(what):
        missing = f"{path}.{found['field']}" if path else found["field"]
        return field_error(missing, f"{missing} is required")
    if found := _UNKNOWN.fullmatch(what):
        value = found["value"][:MAX_NAME_CHARACTERS]
        if value.strip("'") in NO_TEXT:
            no_text = "the models of this server read text alone; leave the part out"
            return field_error(path, f"{path} {value} is not supported here: {no_text}")
        known = "/openapi.json lists the values that are"
        return field_error(path, f"{path} {value} is not supported here; {known}")
    name, value = path, ...
    if place["is_key"]:
        name = f"each key of {path}"
    elif path.endswith("[...]"):  # msgspec does not say at which key
        path = path.removesuffix("[...]")
        name = f"each value of {path}"
    else:
        value = _value_at(fields, path)
    demand, got = _expectation(what, value)
    return field_error(path, f"{name} must {demand}{f', got {got}' if got else ''}")


def _expectation(what: str, value: Any) -> tuple[str, str | None]:
    """The expectation in msgspec's message, and the kind of ``value`` (... if unknown)."""
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
    pattern = found["pattern"].replace(r"\\", "\\")  # msgspec quotes it
    return f"be {pattern_text(pattern)}", None


def _value_at(fields: dict[str, Any], path: str) -> Any:
    value: Any = fields
    for step in _STEPS.finditer(f".{path}"):
        value = value[step["key"]] if step["key"] is not None else value[int(step["index"])]
    return value
