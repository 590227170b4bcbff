"""Named arguments of a call in forms other than one JSON object, as rules of a Lark grammar.

Two forms exist: ``city="Rome", days=3``, whose values are JSON, and dialects of JSON such as
``city:<|"|>Rome<|"|>,at:{lat:4}``, which have their own quotes, and no quotes around keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Protocol, cast

from jaxinfer.text.grammar.schema import resolved

_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]*/"
_NUMBERS = frozenset({"integer", "number", "boolean", "null"})  # as in JSON
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$schema", "$comment", "$id", "format"),
        *("deprecated", "readOnly", "writeOnly", "$defs", "definitions", "nullable", "strict"),
    }
)
_OF_VALUES = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "minItems"),
        *("maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf"),
    }
)


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

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value of a schema."""
        ...

    def text_until(self, end: str, times: str = "*") -> str:
        """A text of so many characters, and the first ``end`` after it."""
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
    """Writes the arguments of one function. Methods raise ``ValueError`` for a keyword of the
    schema, or the name of a required argument, that the form has no rules for.
    """

    rules: Rules
    form: Form
    root: Mapping[str, Any]  # the schema of all arguments
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
            if not self.form.can_write(key):
                if is_required:
                    raise ValueError(f"an argument named {key[:60]!r} cannot be written")
                continue
            written = f"{self.rules.literal(key + self.form.key_end)} {self._value(named[key])}"
            pair = self.rules.rule(written)
            begun = f"{pair} {rest}"
            first = self.rules.rule(begun if is_required else f"({begun} | {first or '""'})")
            later = f"{self.rules.literal(self.form.separator)} {pair}"
            rest = self.rules.rule(f"{later if is_required else f'({later})?'} {rest}")
        return first or '""'

    def _free_pairs(self, schema: Any) -> str:
        """Any keys with values of a schema."""
        pair = f"{_KEY} {self.rules.literal(self.form.key_end)} {self._value(schema)}"
        return f"({self._listed(self.rules.rule(pair))})?"

    def _value(self, schema: Any) -> str:
        """A value of a schema."""
        schema = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
        if self.form.quotes is None:
            names = ("$defs", "definitions") if "$ref" in str(schema) else ()
            return self.rules.json({**{n: self.root[n] for n in names if n in self.root}, **schema})
        if "$ref" in schema:
            return self._referenced(schema)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return f"({' | '.join(self.rules.literal(self._text_of(one)) for one in values)})"
        choices = schema.get("anyOf")
        if isinstance(choices, list) and choices:
            self._check(schema, {"anyOf", "type"})
            return f"({' | '.join(map(self._value, cast('list[Any]', choices)))})"
        self._check(schema, _OF_VALUES)
        declared = schema.get("type")
        types: list[str] = [declared] if isinstance(declared, str) else list(declared or ())
        if schema.get("nullable"):
            types.append("null")
        if not types:
            types = [kind for kind in ("object", "array") if _describes(schema, kind)]
        if not types:
            return self._any_value()
        return f"({' | '.join(self._of_type(kind, schema) for kind in dict.fromkeys(types))})"

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
        times = _times(schema.get("minLength", 0), schema.get("maxLength"))
        return f"{self.rules.literal(begin)} {self.rules.text_until(end, times)}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.rules.rule(self._value(schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        further = _times(max(least - 1, 0), None if most is None else most - 1)
        several = f'{item} ("," {item}){further}'
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
        self._check(schema, {"$ref"})
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

    def _check(self, schema: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
        unknown = sorted(schema.keys() - known - _ANNOTATIONS)
        if unknown:
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
