"""Named arguments of a call in forms other than one JSON object, as rules of a Lark grammar.

Two forms exist: ``city="Rome", days=3``, whose values are JSON, and dialects of JSON such as
``city:<|"|>Rome<|"|>,at:{lat:4}``, which have their own quotes, and no quotes around keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Protocol, cast

from jaxinfer.text.grammar.disjoint import types_of_value
from jaxinfer.text.grammar.patterns import ANY_TEXT, fits
from jaxinfer.text.grammar.prepared import not_followed
from jaxinfer.text.grammar.raw_text import text_expression
from jaxinfer.text.grammar.schema import NOT_FOLLOWED, listed, part_of, resolved

MAX_REFERENCES = 64  # of one to another
_BY_TEXT = frozenset({"minLength", "maxLength", "pattern", "format"})
_ANNOTATED = frozenset({"title", "description", "default", "examples"})
_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]*/"
_NUMBERS = frozenset({"integer", "number", "boolean", "null"})  # as in JSON
# keywords that the rules of values follow, and those that they do not
_OF_VALUES = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "minItems"),
        *("maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_OTHERS = NOT_FOLLOWED | {
    *("$ref", "enum", "const", "allOf", "anyOf", "oneOf", "prefixItems", "additionalItems"),
    *("patternProperties", "minProperties", "maxProperties"),
}


class Rules(Protocol):
    """The grammar that the rules are added to."""

    def rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        ...

    def recursive_rule(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body, made from its name, may contain it."""
        ...

    def literal(self, text: str) -> str:
        """A text in which special tokens stand for themselves."""
        ...

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """A JSON value of a schema; ``lenient``: without keywords that are not supported."""
        ...

    def text_until(self, end: str, text: str = ANY_TEXT) -> str:
        """A text of an expression, and the first ``end`` after it."""
        ...


@dataclass(frozen=True)
class Form:
    """How arguments are written. ``quotes``: around strings; empty: values are JSON."""

    key_end: str
    separator: str
    quotes: tuple[str, str] | None = None

    def can_write(self, key: str) -> bool:
        """True if an argument may have this name."""
        if self.quotes is None:  # a keyword argument of Python
            return key.isidentifier() and not iskeyword(key)
        return re.fullmatch(_KEY[1:-1], key) is not None


@dataclass
class ArgumentsWriter:
    """Writes the arguments of one function. Methods raise ``ValueError`` for the name of a required
    argument that cannot be written, and if ``strict`` for a keyword that the form has no rules for.
    """

    rules: Rules
    form: Form
    root: Mapping[str, Any]  # the schema of all arguments
    strict: bool
    _named: dict[str, str] = field(default_factory=dict)  # rules by reference, or "" for any value

    def arguments(self) -> str:
        """The expression of the arguments, without what surrounds them all."""
        return self._pairs(self.root)

    def _pairs(self, schema: Mapping[str, Any]) -> str:
        """Keys and values in the schema's order; the required ones must be there."""
        properties = cast("Mapping[str, Any]", schema.get("properties") or {})
        required = dict.fromkeys(schema.get("required") or ())
        others = schema.get("additionalProperties", True)
        if not properties and not required:
            has_none = others is False or self.form.quotes is None
            return '""' if has_none else self._free_pairs(others)
        named = {**properties, **{key: others for key in required if key not in properties}}
        rest, first = "", ""  # the rules of what follows a pair, and of what follows nothing
        for key in reversed(named):
            is_required = key in required
            if named[key] is False or not self.form.can_write(key):
                if is_required:
                    raise ValueError(f"an argument named {key[:60]!r} cannot be written")
                continue
            begin = self.rules.literal(key + self.form.key_end)
            pair = self.rules.rule(f"{begin} {self._argument(key, named[key])}")
            begun = f"{pair} {rest}"
            first = self.rules.rule(begun if is_required else f"({begun} | {first or '""'})")
            later = f"{self.rules.literal(self.form.separator)} {pair}"
            rest = self.rules.rule(f"{later if is_required else f'({later})?'} {rest}")
        return first or '""'

    def _free_pairs(self, schema: Any) -> str:
        """Any keys with values of a schema."""
        pair = f"{_KEY} {self.rules.literal(self.form.key_end)} {self._value(schema)}"
        return f"({self._listed(self.rules.rule(pair))})?"

    def _argument(self, key: str, schema: Any) -> str:
        """A value, with its name in errors."""
        try:
            return self._value(schema)
        except ValueError as error:
            raise ValueError(f"in {key[:60]!r} {error}") from None

    def _value(self, schema: Any) -> str:
        """A value of a schema."""
        schema = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
        if self.form.quotes is None:
            return self._json(schema)
        if "$ref" in schema:
            return self._referenced(schema)
        if "enum" in schema or "const" in schema:
            values = map(self._text_of, self._constants(schema))
            return f"({' | '.join(map(self.rules.literal, values))})"
        if parts := listed(schema.get("allOf")):
            return self._value(self._merged(schema, parts))
        for name in ("anyOf", "oneOf"):
            if choices := listed(schema.get(name)):
                self._check(schema, {name, "type"} if name == "anyOf" else {"type"})
                if allowed := self._types(schema):
                    choices = [self._of_types(one, allowed) for one in choices]
                return f"({' | '.join(map(self._value, choices))})"
        self._check(schema, _OF_VALUES)
        declared = schema.get("type")
        types: list[str] = [declared] if isinstance(declared, str) else list(declared or ())
        if schema.get("nullable"):
            types.append("null")
        if not types:
            types = [kind for kind in ("object", "array") if _describes(schema, kind)]
        if not types and _BY_TEXT & schema.keys():
            types = ["string"]
        if not types:
            return self._any_value()
        return f"({' | '.join(self._of_type(kind, schema) for kind in dict.fromkeys(types))})"

    def _types(self, schema: Mapping[str, Any]) -> set[str]:
        """The types that a schema names."""
        declared = schema.get("type")
        return {declared} if isinstance(declared, str) else set(map(str, listed(declared)))

    def _of_types(self, schema: Any, types: set[str]) -> Any:
        """A schema with these types, if it has no others."""
        entries = self._target(schema)
        own = self._types(entries)
        if self.strict and (own - types if own else entries.keys() & (_OTHERS | {"properties"})):
            raise ValueError("the schema's keyword type next to choices is not supported")
        return schema if own else {**entries, "type": sorted(types)}

    def _constants(self, schema: Mapping[str, Any]) -> list[Any]:
        """The values of ``enum`` or ``const``, without texts that other keywords exclude."""
        self._check(schema, {"enum", "const", "type", *_BY_TEXT})
        values = schema.get("enum", [schema.get("const")])
        if types := self._types(schema):
            values = [one for one in values if not types.isdisjoint(types_of_value(one))]
        if own := {name: schema[name] for name in _BY_TEXT if name in schema}:
            texts = text_expression({"type": "string", **own}, {}, strict=self.strict)
            values = [
                one for one in values if not (isinstance(one, str) and texts) or fits(texts, one)
            ]
        if not values:
            raise ValueError("no text fits its keyword enum")
        return values

    def _json(self, schema: Mapping[str, Any]) -> str:
        """A value in JSON."""
        schema = part_of(self.root, schema)
        if self.strict and (keywords := not_followed(schema)):
            raise ValueError(f"the schema's keyword {keywords[0]} is not supported")
        return self.rules.json(schema, lenient=not self.strict)

    def _merged(self, schema: Mapping[str, Any], parts: list[Any]) -> Mapping[str, Any]:
        """A schema of ``allOf`` as one, if each keyword is in one of its parts only."""
        found = {name: value for name, value in schema.items() if name != "allOf"}
        for part in parts:
            if part is False:
                raise ValueError("no value fits its keyword allOf")
            one = self._target(part)
            twice = found.keys() & one.keys() & (_OF_VALUES | _OTHERS)
            if self.strict and any(found[name] != one[name] for name in twice):
                raise ValueError("the schema's keyword allOf is not supported")
            found = {**one, **found}
        return found

    def _target(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or that of its reference."""
        for _ in range(MAX_REFERENCES):
            entries = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
            if entries.keys() - _ANNOTATED != {"$ref"}:
                return entries
            schema = resolved(self.root, str(entries["$ref"]))
        return {}

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return f'"{{" {self._pairs(schema)} "}}"'
        if kind not in _NUMBERS:
            raise ValueError(f"the type {kind!r:.60} is unknown")
        bounds = {name: value for name, value in schema.items() if "imum" in name.lower()}
        if "multipleOf" in schema:
            bounds["multipleOf"] = schema["multipleOf"]
        is_number = kind in ("integer", "number")
        return self.rules.json({"type": kind, **(bounds if is_number else {})})

    def _string(self, schema: Mapping[str, Any]) -> str:
        assert self.form.quotes is not None
        begin, end = self.form.quotes
        own = {name: schema[name] for name in _BY_TEXT if name in schema}
        text = text_expression({"type": "string", **own}, {}, strict=self.strict)
        return f"{self.rules.literal(begin)} {self.rules.text_until(end, text or ANY_TEXT)}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.rules.rule(self._value(schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise ValueError("no list fits its keyword minItems")
        if most == 0 or schema.get("items") is False:
            return '"[" "]"'
        further = _times(max(least - 1, 0), None if most is None else most - 1)
        several = item if most == 1 else f'{item} ("," {item}){further}'
        return f'"[" {several if least else f"({several})?"} "]"'

    def _listed(self, item: str) -> str:
        return f"{item} ({self.rules.literal(self.form.separator)} {item})*"

    def _any_value(self) -> str:
        """A value of any kind."""
        if "" not in self._named:

            def body(name: str) -> str:
                self._named[""] = name
                pair = f"{_KEY} {self.rules.literal(self.form.key_end)} {name}"
                plain = self.rules.json({"type": sorted(_NUMBERS)})
                return (
                    f'{self._string({})} | {plain} | "[" ({name} ("," {name})*)? "]" | '
                    f'"{{" ({pair} ("," {pair})*)? "}}"'
                )

            self.rules.recursive_rule(body)
        return self._named[""]

    def _referenced(self, schema: Mapping[str, Any]) -> str:
        """The rule of a definition, which may contain itself."""
        self._check(schema, {"$ref", "type"})
        ref = schema["$ref"]
        target = resolved(self.root, ref) if isinstance(ref, str) else True
        if not isinstance(target, Mapping):
            raise ValueError(f"the reference {ref!r:.60} has no target")
        if ref not in self._named:

            def body(name: str) -> str:
                self._named[ref] = name
                return self._value(target)

            self.rules.recursive_rule(body)
        return self._named[ref]

    def _text_of(self, value: Any) -> str:
        """A constant as text."""
        if isinstance(value, str):
            assert self.form.quotes is not None
            return value.join(self.form.quotes)
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value).items()
            return f"{{{','.join(f'{key}:{self._text_of(one)}' for key, one in pairs)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._text_of, cast('list[Any]', value)))}]"
        return json.dumps(value)

    def _check(self, schema: Mapping[str, Any], known: Set[str]) -> None:
        unknown = sorted(schema.keys() & (_OF_VALUES | _OTHERS) - known)
        if unknown and self.strict:
            raise ValueError(f"the schema's keyword {unknown[0][:60]} is not supported")


def _times(least: Any, most: Any) -> str:
    """How often something occurs, in the notation of regular expressions."""
    if not all(isinstance(one, int) for one in (least, 0 if most is None else most)):
        raise ValueError("lengths must be whole numbers")
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"


def _describes(schema: Mapping[str, Any], kind: str) -> bool:
    return ("properties" if kind == "object" else "items") in schema
