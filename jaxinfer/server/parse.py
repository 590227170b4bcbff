"""A body becomes a request, or an error that names the field.

Owns: JSON, wording, the paths of fields, unknown and unsupported fields.
Must not know: what the fields mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from jaxinfer.server.errors import ApiError
from jaxinfer.server.fields import refused
from jaxinfer.server.schema import AnyRequest

MAX_NAMES_TOLD = 16  # unknown fields that an error or the log spells out
MAX_NAME_CHARACTERS = 64

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
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_TYPES = re.compile(r"Expected `(?P<types>[^`]*)`, got `.*`")
_RANGE = re.compile(r"Expected `(?:int|float)` (?P<sign>>=|>|<=|<) (?P<bound>\S+)")
_LENGTH = re.compile(r"Expected `(?P<type>\w+)` of length (?P<sign>>=|<=) (?P<bound>\d+)")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_STEPS = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_SIGNS: Mapping[str, str] = MappingProxyType(
    {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
)
_UNITS: Mapping[str, str] = MappingProxyType(
    {"str": "characters", "array": "items", "object": "entries"}
)


class Parsed[T](NamedTuple):
    """A request, and the names of the fields that nothing here knows (the first few, clipped)."""

    request: T
    unknown: tuple[str, ...]


def parse[T: AnyRequest](body: bytes, kind: type[T], *, strict: bool = False) -> Parsed[T]:
    """The request of type ``kind`` that a JSON ``body`` is.

    A field that is null counts as absent. ``strict`` refuses unknown fields. Raises ``ApiError``
    (400) with the path of the field to blame in ``param``.
    """
    given = _decode(body)
    if not isinstance(given, dict):
        raise refused(None, f"the body must be a JSON object, got {_got(given)}")
    named = cast("dict[str, Any]", given)
    _refuse_unsupported(named, kind)
    fields = {name: value for name, value in named.items() if value is not None}
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
    """What is wrong with a body that is not strict JSON.

    Python's own parser takes NaN, Infinity, 1e999 and half surrogates, which clients do send; where
    it succeeds, the field that holds one can be named.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return refused(None, f"the body is not UTF-8 (byte {error.start}); send UTF-8")
    try:
        lax = json.loads(text)
        for path, value in _leaves(lax, ""):
            if isinstance(value, float) and not math.isfinite(value):
                return refused(path, f"{path or 'the body'} must be a finite number")
            if isinstance(value, str) and not _encodable(value):
                return refused(
                    path, f"{path or 'the body'} holds half a surrogate pair; send UTF-8"
                )
    except (ValueError, RecursionError):
        pass  # not even that parser reads it: the first one's words say where it broke
    return refused(None, f"the body is not valid JSON: {reason}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every number and string in a JSON value, with its path."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            place = f"{path}.{key}" if path else key
            yield place if _encodable(key) else path, key
            yield from _leaves(inner, place)
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unsupported(given: dict[str, Any], kind: type[AnyRequest]) -> None:
    for name, neutral in kind.unsupported.items():
        if name in given and not any(_same(given[name], value) for value in neutral):
            raise refused(name, f"{name} is not supported; leave it out")


def _same(given: Any, neutral: Any) -> bool:
    return type(given) is type(neutral) and given == neutral


def _unknown(fields: dict[str, Any], kind: type[AnyRequest]) -> tuple[str, ...]:
    known = {*kind.__struct_fields__, *kind.unsupported, *kind.ignored}
    names = sorted(name for name in fields if name not in known)
    return tuple(name[:MAX_NAME_CHARACTERS] for name in names[:MAX_NAMES_TOLD])


def _worded(message: str, fields: dict[str, Any]) -> ApiError:
    """msgspec's message in plain words, with the path of the field."""
    place = _PLACE.fullmatch(message)
    assert place is not None  # the pattern takes any text
    what, path = place["what"], (place["path"] or "").removesuffix("[...]").lstrip(".")
    name = path or "the body"
    if found := _MISSING.fullmatch(what):
        missing = f"{path}.{found['field']}" if path else found["field"]
        return refused(missing, f"{missing} is required")
    value = _value_at(fields, path)
    if found := _TYPES.fullmatch(what):
        nouns = [_NOUNS[kind] for kind in found["types"].split(" | ") if kind != "null"]
        return refused(path, f"{name} must be {' or '.join(nouns)}, got {_got(value)}")
    if found := _RANGE.fullmatch(what):
        bound = f"{float(found['bound']):g}" if "." in found["bound"] else found["bound"]
        return refused(path, f"{name} must be {_SIGNS[found['sign']]} {bound}{_number(value)}")
    if found := _LENGTH.fullmatch(what):
        sign, unit = _SIGNS[found["sign"]], _UNITS[found["type"]]
        return refused(path, f"{name} must have {sign} {found['bound']} {unit}, got {len(value)}")
    return refused(path or None, f"{name} is not possible: {what}")


def _value_at(fields: dict[str, Any], path: str) -> Any:
    value: Any = fields
    for step in _STEPS.finditer(f".{path}" if path else ""):
        value = value[step["key"]] if step["key"] is not None else value[int(step["index"])]
    return value


def _got(value: Any) -> str:
    return _GOT[type(value)]


def _number(value: Any) -> str:
    return f", got {value}" if isinstance(value, (int, float)) else ""
