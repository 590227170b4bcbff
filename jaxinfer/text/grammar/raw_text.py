"""Values of a schema as text without JSON's quotes, as between tags or in quotes of a format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

from jaxinfer.text.grammar.disjoint import types_of_value
from jaxinfer.text.grammar.patterns import (
    FORMATS,
    either,
    format_expression,
    is_empty,
    literal,
    search_expression,
)
from jaxinfer.text.grammar.schema import is_long, listed, resolved

MAX_CHOICES = 64  # of ``anyOf`` and ``oneOf``, multiplied
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_BY_VALUE = ("enum", "const", "pattern", "format", "minLength", "maxLength")  # limits of texts
_OF_OTHERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items"),
    *("properties", "required", "additionalProperties", "minItems", "maxItems", "prefixItems"),
)
_UNKNOWN = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True)
class _Case:
    """The schemas that a value has to fit, of all that hold together."""

    types: frozenset[str] = _TYPES
    constants: tuple[Any, ...] | None = None
    limits: tuple[str, ...] = ()  # expressions of texts
    keywords: tuple[str, ...] = ()  # that the limits are of
    unknown: tuple[str, ...] = ()  # keywords whose limits have no expression
    of_others: tuple[str, ...] = ()  # keywords that limit what are no strings
    least: int = 0  # characters
    most: int | None = None

    def and_(self, other: _Case) -> _Case | None:
        """The case of both; None if no value fits both."""
        types = self.types & other.types
        constants = self.constants if other.constants is None else other.constants
        if self.constants is not None and other.constants is not None:
            constants = tuple(one for one in self.constants if one in other.constants)
        lengths = [one for one in (self.most, other.most) if one is not None]
        if constants is not None:
            constants = tuple(one for one in constants if not types.isdisjoint(types_of_value(one)))
        least, most = max(self.least, other.least), min(lengths, default=None)
        if not types or (most is not None and most < least):
            return None
        return _Case(
            types,
            constants,
            self.limits + other.limits,
            self.keywords + other.keywords,
            self.unknown + other.unknown,
            self.of_others + other.of_others,
            least,
            most,
        )

    @property
    def not_held(self) -> tuple[str, ...]:
        """Keywords that a text of the case, which may be read as another type, may not follow."""
        if self.constants is None:
            is_read = self.types != _TYPES and bool(self.types - {"string", "null"})
        else:
            is_read = any(one is not None for one in self.others)
        return self.unknown + (self.of_others if is_read else ())

    @property
    def has_texts(self) -> bool:
        """True if some values are strings."""
        constants = self.constants
        return "string" in self.types and (constants is None or any(map(_is_text, constants)))

    @property
    def is_of_others(self) -> bool:
        """True if no value is a string, and not each is null or a constant."""
        return "string" not in self.types and self.constants is None and self.types != {"null"}

    @property
    def others(self) -> list[Any]:
        """The values, of some, that are no strings."""
        if self.constants is None:
            return [None] * ("null" in self.types and self.types != _TYPES)
        is_text = self.types == {"string"}
        return [one for one in self.constants if not _is_text(one) and not is_text]

    @property
    def expression(self) -> str:
        """The texts of the case's strings; empty: any."""
        parts = list(self.limits)
        if self.constants is not None:
            parts.insert(0, either(literal(one) for one in self.constants if _is_text(one)))
        if self.least or self.most is not None:
            most = "" if self.most is None else self.most
            parts.append(rf"/(.|\n){{{self.least},{most}}}/")
        return " & ".join(f"({part})" for part in parts)


def text_expression(schema: Any, root: Any, *, strict: bool) -> str:
    """The texts that are strings of a schema, or null, in Lark's syntax; empty: any text.

    ``root``: the document of references. ``strict``: raises ``ValueError`` that names the keyword
    if a text may be no value of the schema; otherwise what has no expression, or is longer than
    ``MAX_LENIENT_LENGTH``, does not limit texts.
    """
    cases = _cases(schema, root, ())
    if not strict:
        cases = [replace(one, most=None) if is_long(one.most) else one for one in cases]
    texts = [case for case in cases if case.has_texts]
    limited = [name for case in texts for name in case.keywords if case.expression]
    if strict and (unknown := [name for case in cases for name in case.not_held]):
        raise ValueError(f"the keyword {unknown[0]} is not possible for a text")
    if any(case.is_of_others for case in cases) and limited:
        # any text may be meant as a string
        if strict:
            raise ValueError(f"the keyword {limited[0]} is not possible for a text or a number")
        return ""
    if not all(case.expression for case in texts):
        return ""
    found = [f"({case.expression})" for case in texts]
    found += [literal(json.dumps(one)) for case in cases for one in case.others]
    expression = either(found) if found else ""
    if not expression or is_empty(expression):
        raise ValueError(f"no text fits its keyword {(*limited, 'type')[0]}")
    return expression


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _cases(schema: Any, root: Any, seen: Sequence[str]) -> list[_Case]:
    """The cases of which a value has to fit one."""
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return [_Case()]
    entries = cast("Mapping[str, Any]", schema)
    groups = [[_own(entries)]]
    if isinstance(ref := entries.get("$ref"), str) and ref not in seen:
        groups.append(_cases(resolved(root, ref), root, (*seen, ref)))
    groups += (_cases(one, root, seen) for one in listed(entries.get("allOf")))
    for name in ("anyOf", "oneOf"):
        if choices := listed(entries.get(name)):
            found = [case for one in choices for case in _cases(one, root, seen)]
            groups.append(_told_apart(found) if name == "oneOf" else found)
    number = 1
    for group in groups:
        number *= len(group)
    if number > MAX_CHOICES:
        return [_Case(unknown=("anyOf",))]
    return list(_joined(groups))


def _joined(groups: list[list[_Case]]) -> Iterator[_Case]:
    for cases in product(*groups):
        found: _Case | None = _Case()
        for case in cases:
            found = None if found is None else found.and_(case)
        if found is not None:
            yield found


def _told_apart(cases: list[_Case]) -> list[_Case]:
    """The cases of a ``oneOf``. A text that fits two of them is none of its values."""
    texts = [case for case in cases if "string" in case.types]
    constants = [one for case in texts for one in case.constants or ()]
    unlimited = [case for case in texts if case.constants is None]
    if len(texts) < 2 or not unlimited and len({*map(repr, constants)}) == len(constants):
        return cases
    return [replace(case, unknown=(*case.unknown, "oneOf")) for case in cases]


def _own(schema: Mapping[str, Any]) -> _Case:
    """The demands of a schema itself on a text."""
    declared = schema.get("type")
    types = frozenset({declared} if isinstance(declared, str) else map(str, listed(declared)))
    types = (types | {"null"} if schema.get("nullable") else types) if types else _TYPES
    unknown = [name for name in _UNKNOWN if name in schema]
    limits: list[str] = []
    if isinstance(pattern := schema.get("pattern"), str):
        try:
            limits.append(search_expression(pattern))
            is_empty(limits[-1])
        except ValueError:
            limits, unknown = [], [*unknown, "pattern"]
    if isinstance(name := schema.get("format"), str) and name in FORMATS:
        limits.append(format_expression(name))
    constants: tuple[Any, ...] | None = None
    if isinstance(schema.get("enum"), list):
        constants = tuple(schema["enum"])
    if "const" in schema:
        value = schema["const"]
        constants = (value,) if constants is None or value in constants else ()
    return _Case(
        types,
        constants,
        tuple(limits),
        tuple(name for name in _BY_VALUE if name in schema),
        tuple(unknown),
        tuple(name for name in _OF_OTHERS if name in schema),
        _length(schema.get("minLength")) or 0,
        _length(schema.get("maxLength")),
    )


def _length(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value >= 0 else None
