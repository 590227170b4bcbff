"""Schemas that exclude each other: by their types, by constants, or by a property of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

from jaxinfer.text.grammar.schema import listed, resolved

type Schema = Mapping[str, Any]
MAX_PAIRS = 2000  # of the choices of a oneOf that are compared; a pair takes 20 us
MAX_DEPTH = 16  # of references and properties that are followed
DEPTH_OF_CHOICES = 5  # choices within choices multiply
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def told_apart_by(choices: Sequence[Any], root: Any) -> str | None:
    """The name of a property whose constants differ in all ``choices``, which are objects; None if
    there is none. A value that has it fits one of them at most.
    """
    all_parts = [list(_parts(one, root)) for one in choices]
    first = all_parts[0] if all_parts else []
    named = [name for part in first for name in _mapping(part.get("properties"))]
    for name in dict.fromkeys([*_required(first), *named]):
        found = [_constants(list(_property(parts, name, root))) for parts in all_parts]
        texts = [json.dumps(value) for values in found for value in values or ()]
        if all(found) and len(set(texts)) == len(texts) and not _has_floats(found):
            return name
    return None


def requires(schema: Any, name: str, root: Any) -> bool:
    """True if a schema is of objects that all have a property."""
    parts = list(_parts(schema, root))
    return name in _required(parts) and _types(parts) == {"object"}


def exclude_each_other(choices: Sequence[Any], root: Any) -> bool:
    """True if no value fits two of the ``choices``, as far as is easily seen."""
    if len(choices) * (len(choices) - 1) // 2 > MAX_PAIRS:
        return False
    parts = [list(_parts(one, root)) for one in choices]
    return all(_exclude(one, other, root, 0) for one, other in combinations(parts, 2))


def _has_floats(found: Sequence[list[Any] | None]) -> bool:
    """True if values may be equal whose texts are not."""
    return any(isinstance(value, (float, list, dict)) for values in found for value in values or ())


def _parts(schema: Any, root: Any, depth: int = 0) -> Iterator[Schema]:
    """The schemas that a value has to fit all of: through references and ``allOf``."""
    if schema is False:
        yield {"enum": []}
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    entries = cast("Schema", schema)
    yield entries
    if isinstance(ref := entries.get("$ref"), str):
        yield from _parts(resolved(root, ref), root, depth + 1)
    for one in listed(entries.get("allOf")):
        yield from _parts(one, root, depth + 1)


def _exclude(one: list[Schema], other: list[Schema], root: Any, depth: int) -> bool:
    """True if no value fits all of two lists of schemas."""
    if depth > MAX_DEPTH:
        return False
    constants, others = _constants(one), _constants(other)
    if constants is not None and others is not None:
        return not any(_equal(value, another) for value in constants for another in others)
    types = _types(one) & _types(other)
    if not types:
        return True
    if types == {"object"}:
        for name in {*_required(one), *_required(other)}:
            first, second = list(_property(one, name, root)), list(_property(other, name, root))
            if _exclude(first, second, root, depth + 1):
                return True
    return _some_choices_exclude(one, other, root, depth) or _some_choices_exclude(
        other, one, root, depth
    )


def _some_choices_exclude(one: list[Schema], other: list[Schema], root: Any, depth: int) -> bool:
    """``_exclude`` for each of the choices that one of the schemas in ``one`` has."""
    for part in one:
        for name in ("anyOf", "oneOf"):
            choices = listed(part.get(name))
            rest = [inner for inner in one if inner is not part]
            if choices and all(
                _exclude([*rest, *_parts(choice, root)], other, root, depth + DEPTH_OF_CHOICES)
                for choice in choices
            ):
                return True
    return False


def _constants(parts: list[Schema]) -> list[Any] | None:
    """The only values of some schemas; None if there are others."""
    for part in parts:
        if "const" in part:
            return [part["const"]]
        if isinstance(part.get("enum"), list):
            return part["enum"]
    return None


def _types(parts: list[Schema]) -> set[str]:
    """The types that all of some schemas allow; an integer is a number, too."""
    found = set(_TYPES)
    for part in parts:
        declared = part.get("type")
        names = {declared} if isinstance(declared, str) else set(map(str, listed(declared)))
        if "type" in part:
            found &= names | ({"integer"} if "number" in names else set())
    constants = _constants(parts)
    return (
        found
        if constants is None
        else found & {t for one in constants for t in types_of_value(one)}
    )


def types_of_value(value: Any) -> tuple[str, ...]:
    """The types of a value, in JSON schemas."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int() | float():
            return ("integer", "number")
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _required(parts: list[Schema]) -> list[str]:
    return [name for part in parts for name in listed(part.get("required")) if type(name) is str]


def _property(parts: list[Schema], name: str, root: Any) -> Iterator[Schema]:
    """The schemas of a property."""
    for part in parts:
        named = _mapping(part.get("properties"))
        if name in named:
            yield from _parts(named[name], root)
        elif not part.get("patternProperties"):
            yield from _parts(part.get("additionalProperties", True), root)


def _mapping(value: Any) -> Schema:
    return cast("Schema", value) if isinstance(value, Mapping) else {}


def _equal(one: Any, other: Any) -> bool:
    """As in JSON, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
