"""JSON schemas in the words that llguidance follows: an equal one, or a closed or looser one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.text.grammar.disjoint import exclude_each_other, requires, told_apart_by
from jaxinfer.text.grammar.patterns import (
    ANY_TEXT,
    KNOWN_FORMATS,
    either,
    fits,
    is_empty,
    is_pattern,
    literal,
    search_expression,
)
from jaxinfer.text.grammar.schema import (
    NOT_FOLLOWED,
    endless,
    is_long,
    listed,
    reached,
    resolved,
)

type Schema = Mapping[str, Any]
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
_SEE_OTHERS = ("unevaluatedProperties", "unevaluatedItems")  # what other schemas have seen
_ALL = (True, {})  # schemas that every value fits
# keywords that llguidance does not know, and when they demand nothing
_DEMANDS_NOTHING: Mapping[str, Callable[[Any, Schema], bool]] = MappingProxyType(
    {
        "uniqueItems": lambda value, _: value is False,
        "contains": lambda _, schema: (
            schema.get("minContains") == 0 and "maxContains" not in schema
        ),
        "minContains": lambda value, schema: value == 0 or "contains" not in schema,
        "maxContains": lambda _, schema: "contains" not in schema,
        "dependentRequired": lambda value, _: not any(_values(value)),
        "dependentSchemas": lambda value, _: all(one in _ALL for one in _values(value)),
        "dependencies": lambda value, _: all(one in (True, {}, []) for one in _values(value)),
        "unevaluatedProperties": lambda value, _: value in _ALL,
        "unevaluatedItems": lambda value, _: value in _ALL,
        "propertyNames": lambda value, _: value in _ALL,
        "if": lambda _, schema: not schema.keys() & {"then", "else", *_SEE_OTHERS},
        "then": lambda value, schema: "if" not in schema or value in _ALL,
        "else": lambda value, schema: "if" not in schema or value in _ALL,
        "not": lambda value, _: value is False,
        "$dynamicAnchor": lambda _, __: True,
        "$recursiveAnchor": lambda _, __: True,
    }
)

# keywords of schemas that may have to be written in another way
_CHANGED = frozenset(
    {
        *(*_DEMANDS_NOTHING, "format", "oneOf", "pattern", "properties", "patternProperties"),
        *("allOf", "anyOf", "required", "maxLength", "$ref"),
    }
)


def prepared(
    schema: Schema, schemas: list[Schema], *, closed: bool = False, lenient: bool = False
) -> Schema:
    """The schema, without keywords that demand nothing and with others in words that llguidance
    follows. ``schemas``: those within it, which ``check_schema`` has found.

    ``closed``: objects have no properties but those that they name, unless they say so.
    ``lenient``: without patterns that cannot be followed and great lengths of texts; llguidance has
    such an option for others.
    """
    changed = {id(one): not one.keys().isdisjoint(_CHANGED) for one in schemas}
    if not any(changed.values()):
        return schema
    refers = any("$ref" in one for one in schemas)
    without_end: set[int] = endless(schema, schemas) if refers else set()
    groups = dict(_groups(schema, schemas)) if closed else {}
    writer = _Writer(schema, changed, without_end, groups, closed=closed, lenient=lenient)
    return cast("Schema", writer.written(schema))


def not_followed(schema: Schema) -> list[str]:
    """The keywords of a prepared schema that limit its values and are not followed."""
    found = {name for _, one in reached(schema) for name in one.keys() & NOT_FOLLOWED}
    patterns = [one.get("pattern") for _, one in reached(schema)]
    if any(isinstance(one, str) and not is_pattern(one) for one in patterns):
        found.add("pattern")
    return sorted(found)


def annotated_formats(document: Any) -> list[str]:
    """The formats of texts, anywhere in a document with schemas, that limit nothing."""
    found, rest = set[str](), [document]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            entries = cast("Schema", value)
            name = entries.get("format")
            if isinstance(name, str) and name not in KNOWN_FORMATS:
                found.add(name)
            rest.extend(entries.values())
        elif isinstance(value, list):
            rest.extend(cast("list[Any]", value))
    return sorted(found)


@dataclass(frozen=True)
class _Writer:
    root: Schema
    schemas: Mapping[int, bool]  # by id, whether they may change; what else there is is data
    endless: set[int]
    groups: Mapping[int, list[Schema]]  # by id: those that a value has to fit as well
    closed: bool
    lenient: bool

    @cached_property
    def parts(self) -> set[int]:
        """The ids of schemas that say a part of what an object is."""
        return {id(part) for parts in self.groups.values() for part in parts}

    def written(self, value: Any) -> Any:
        """A part of the document."""
        if isinstance(value, list):
            return [self.written(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        entries = cast("Schema", value)
        if id(value) in self.endless:  # a value that begins like one would never end
            return False
        if not self.schemas.get(id(value)):
            return {
                name: self.written(one) if isinstance(one, (list, dict)) else one
                for name, one in entries.items()
            }
        kept = _demanding(entries)
        if self.lenient and isinstance(pattern := kept.get("pattern"), str):
            kept = kept if is_pattern(pattern) else _without(kept, "pattern")
        if self.lenient and is_long(kept.get("maxLength")):
            kept = _without(kept, "maxLength")
        kept = _with_names(kept)
        if self.closed and id(value) not in self.parts:
            kept = _closed(kept, self.groups.get(id(value), []))
        kept = {name: self.written(one) for name, one in kept.items()}
        if isinstance(kept.get("oneOf"), list):
            kept = self._with_choices(kept)
        return _with_own_patterns(kept) if kept.get("patternProperties") else kept

    def _with_choices(self, schema: dict[str, Any]) -> dict[str, Any]:
        """``oneOf`` as ``anyOf`` where no value fits two of its schemas."""
        choices = listed(schema["oneOf"])
        types = {"type": schema["type"]} if "type" in schema else {}
        typed = [{"allOf": [one, types]} for one in choices] if types else choices
        name = told_apart_by(typed, self.root)
        if name is not None:
            # without the property a value would fit several of them
            choices = [
                one if requires(of_type, name, self.root) else {"allOf": [one, _object_with(name)]}
                for one, of_type in zip(choices, typed, strict=True)
            ]
        elif not exclude_each_other(typed, self.root):
            return schema
        if "anyOf" in schema:
            others = _without(schema, "oneOf")
            return {**others, "allOf": [*listed(schema.get("allOf")), {"anyOf": choices}]}
        return {
            ("anyOf" if key == "oneOf" else key): (choices if key == "oneOf" else value)
            for key, value in schema.items()
        }


def _object_with(name: str) -> dict[str, Any]:
    return {"type": "object", "required": [name]}


def _values(value: Any) -> list[Any]:
    return [*cast("Schema", value).values()] if isinstance(value, Mapping) else [value]


def _without(schema: Schema, *names: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in names}


def _demanding(schema: Schema) -> dict[str, Any]:
    """A schema without keywords that demand nothing. An unknown format is an annotation."""
    return {
        name: value
        for name, value in schema.items()
        if not (name in _DEMANDS_NOTHING and _DEMANDS_NOTHING[name](value, schema))
        and not (name == "format" and isinstance(value, str) and value not in KNOWN_FORMATS)
    }


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """``propertyNames`` and ``unevaluated...`` in other words, where other keywords allow it."""
    if any(name in schema for name in _IN_PLACE):
        return schema
    if schema.get("unevaluatedProperties") is False:
        schema = {"additionalProperties": False, **_without(schema, "unevaluatedProperties")}
    if schema.get("unevaluatedItems") is False and "contains" not in schema:
        schema = {"items": False, **_without(schema, "unevaluatedItems")}
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or "properties" in schema or "patternProperties" in schema:
        return schema
    entries = _without(cast("Schema", names), "type", "title", "description")
    others = schema.get("additionalProperties", True)
    rest = {**_without(schema, "propertyNames"), "additionalProperties": False}
    match entries:
        case {"enum": list(values)} if len(entries) == 1:
            texts = [value for value in cast("list[Any]", values) if isinstance(value, str)]
            return {**rest, "properties": dict.fromkeys(texts, others)}
        case {"pattern": str(pattern)} if len(entries) == 1 and "required" not in schema:
            return {**rest, "patternProperties": {pattern: others}}
        case _:
            return schema


def _closed(schema: dict[str, Any], parts: list[Schema]) -> dict[str, Any]:
    """An object without properties that it, or one of its ``parts``, does not name, unless one of
    them says that there may be some.
    """
    everything = [schema, *parts]
    if any("additionalProperties" in one or "unevaluatedProperties" in one for one in everything):
        return schema
    if not any("properties" in one or "patternProperties" in one for one in everything):
        return schema
    named = [schema.get("properties", {}), *(one.get("properties") for one in parts)]
    names = [name for one in named if isinstance(one, Mapping) for name in one]
    names += [name for one in everything for name in listed(one.get("required"))]
    patterns = [one.get("patternProperties") for one in everything]
    closed = {**schema, "additionalProperties": False}
    if isinstance(named[0], Mapping):
        closed["properties"] = {**dict.fromkeys(filter(_is_text, names), True), **named[0]}
    found = [pattern for one in patterns if isinstance(one, Mapping) for pattern in one]
    if found and isinstance(patterns[0] or {}, Mapping):
        closed["patternProperties"] = {**dict.fromkeys(found, True), **(patterns[0] or {})}
    return closed


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _groups(root: Any, schemas: list[Schema]) -> Iterator[tuple[int, list[Schema]]]:
    """Schemas, by id, that a value fits together with others, and these others."""
    for schema in schemas:
        inner = list(_inner(schema))
        names_some = any(one in schema for one in ("properties", "patternProperties", "required"))
        if len(inner) + names_some > 1:
            yield id(schema), list(_all_of_it(inner, root))


def _inner(schema: Schema) -> Iterator[list[Any]]:
    """The groups of schemas that a value of a schema has to fit as well, one of each."""
    if isinstance(ref := schema.get("$ref"), str):
        yield [ref]
    yield from ([one] for one in listed(schema.get("allOf")))
    yield from (choices for name in ("anyOf", "oneOf") if (choices := listed(schema.get(name))))


def _all_of_it(groups: list[list[Any]], root: Any) -> Iterator[Schema]:
    """Schemas, and those that a value of theirs has to fit as well."""
    waiting, found = [one for group in groups for one in group], set[int]()
    while waiting:
        one = waiting.pop()
        one = resolved(root, one) if isinstance(one, str) else one
        if isinstance(one, Mapping) and id(one) not in found:
            found.add(id(one))
            yield cast("Schema", one)
            waiting += [inner for group in _inner(cast("Schema", one)) for inner in group]


def _with_own_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """``patternProperties`` without patterns that only properties with a schema of their own fit.

    llguidance would allow a comma for a further property of such a pattern, and then nothing.
    """
    patterns, named = schema["patternProperties"], schema.get("properties", {})
    if not isinstance(patterns, Mapping) or not isinstance(named, Mapping):
        return schema
    properties = dict(cast("Schema", named))
    required = (name for name in listed(schema.get("required")) if isinstance(name, str))
    names = dict.fromkeys([*properties, *required])
    if not names:
        return schema
    kept: dict[str, Any] = {}
    for pattern, one in cast("Schema", patterns).items():
        try:
            expression = search_expression(pattern)
            is_theirs = is_empty(_except(expression, names))
            found = [name for name in names if is_theirs and fits(expression, name)]
        except ValueError:  # llguidance says what is wrong with the pattern
            is_theirs, found = False, []
        if not is_theirs:
            kept[pattern] = one
        for name in found:
            own = properties.get(name, True)
            properties[name] = False if one is False else {"allOf": [own, one]}
    changed = {**schema, "properties": properties, "patternProperties": kept}
    if False in kept.values() and _cover_all(kept, names):
        changed["additionalProperties"] = False
    return changed if kept else _without(changed, "patternProperties")


def _except(expression: str, names: Schema) -> str:
    return f"{expression} & ~{either(map(literal, names))}" if names else expression


def _cover_all(patterns: Schema, names: Schema) -> bool:
    """True if each name is one of these, or fits one of the patterns."""
    try:
        taken = either([*map(search_expression, patterns), *map(literal, names)])
        return is_empty(f"{ANY_TEXT} & ~{taken}")
    except ValueError:
        return False
