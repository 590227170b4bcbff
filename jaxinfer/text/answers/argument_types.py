"""The values of arguments that a model writes as text: their types are those of the schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import regex

from jaxinfer.text.answers.python_calls import read_python_value
from jaxinfer.text.answers.strict_json import strict_json
from jaxinfer.text.grammar.schema import resolved

type Schema = Mapping[str, Any]
_NULLS = ("null", "None")
_BY_KEYWORD = (
    ("properties", "object"),
    ("additionalProperties", "object"),
    ("items", "array"),
    ("prefixItems", "array"),
)


def schemas_of(schema: Any, root: Any, seen: Sequence[str] = ()) -> Iterator[Schema]:
    """A schema, and those that it refers to or combines: ``$ref`` within ``root``, ``allOf``,
    ``anyOf`` and ``oneOf``.
    """
    if not isinstance(schema, Mapping):
        return
    entries = cast("Schema", schema)
    yield entries
    reference = entries.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        yield from schemas_of(resolved(root, reference), root, (*seen, reference))
    for name in ("allOf", "anyOf", "oneOf"):
        inner = entries.get(name)
        for one in cast("list[Any]", inner) if isinstance(inner, list) else ():
            yield from schemas_of(one, root, seen)


def types_of(schema: Any, root: Any = None) -> tuple[str, ...]:
    """The types that a JSON schema allows, in its order; empty if it names none."""
    found = [one for part in schemas_of(schema, root) for one in _own_types(part)]
    return tuple(dict.fromkeys(found))


def _own_types(schema: Schema) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (one for one in cast("list[Any]", declared) if isinstance(one, str))
    else:
        yield from map(_type_of_value, choices_of(schema))
        yield from (name for keyword, name in _BY_KEYWORD if keyword in schema)
    if schema.get("nullable"):
        yield "null"


def choices_of(schema: Schema) -> list[Any]:
    """The only values that a schema itself allows (``enum`` or ``const``); empty: any."""
    listed = schema.get("enum")
    if isinstance(listed, list):
        return cast("list[Any]", listed)
    return [schema["const"]] if "const" in schema else []


def _type_of_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def is_plain_text(schema: Any, root: Any = None) -> bool:
    """True if ``typed`` returns every text as it is."""
    listed = any(choices_of(part) for part in schemas_of(schema, root))
    return not listed and types_of(schema, root) in ((), ("string",))


def typed(value: Any, schema: Any, root: Any = None) -> Any:
    """A text as the value of the schema that it is: one of the listed values, else null, else the
    first of the types that fits it, else as it is. Nothing, and null of another type than text, is
    None, where that can be meant. ``root``: the document of references.
    """
    types = types_of(schema, root)
    if isinstance(value, list):
        return value if "array" in types else [typed(one, schema, root) for one in value]
    if not isinstance(value, str):
        return value
    listed = [one for part in schemas_of(schema, root) for one in choices_of(part)]
    for one in listed:
        if value.strip() == (one if isinstance(one, str) else json.dumps(one)):
            return one
    # models write null for a text that is left out
    for name in sorted(types, key=lambda name: name != "null"):
        try:
            return _as_type(value, name)
        except ValueError:
            continue
    return None if _is_absent(value, types) else value


def _is_absent(text: str, types: Sequence[str]) -> bool:
    """True if a text of these types says that there is no value: null, which models also write
    for types that do not allow it, or, if it may be null, nothing.
    """
    if not types or "string" in types:
        return False
    word = text.strip()
    return word in _NULLS or (not word and "null" in types)


def _as_type(text: str, name: str) -> Any:
    word = text.strip()
    match name:
        case "string":
            return text
        case "integer" | "number":
            if regex.fullmatch(r"[-+]?\d+", word):
                return int(word)  # also one beyond every float
            number = float(word)
            if not math.isfinite(number) or (name == "integer" and not number.is_integer()):
                raise ValueError(text)
            return int(number) if name == "integer" else number
        case "boolean" if word.lower() in ("true", "false", "1", "0"):
            return word.lower() in ("true", "1")
        case "null" if word in _NULLS:
            return None
        case "object" | "array":
            value = _read(word)
            if isinstance(value, dict if name == "object" else list):
                return value
        case _:
            pass
    raise ValueError(text)


def _read(text: str) -> Any:
    """The value of JSON, or of a literal of Python, which models write at times."""
    try:
        return strict_json(text)
    except ValueError:
        return read_python_value(text)
