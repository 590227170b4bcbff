"""Random JSON schemas of the keywords that answers can follow, for hypothesis.

Owns: ``schemas``. Lists and texts have small bounds, so that a random model ends them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", "é", "two words", 'quo"te', "x.y", "ключ"])
SCALARS = st.one_of(
    st.integers(-99, 99),
    st.booleans(),
    st.none(),
    st.text('ab "\\/\n\té☃', max_size=6),
    st.sampled_from([0.5, -1.25]),
)


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    def bounded(low: int, width: int, open_low: bool, open_high: bool) -> dict[str, Any]:
        high = low + width + 2
        return {
            "type": kind,
            "exclusiveMinimum" if open_low else "minimum": low,
            "exclusiveMaximum" if open_high else "maximum": high,
        }

    bounds = st.builds(
        bounded, st.integers(-200, 200), st.integers(0, 999), st.booleans(), st.booleans()
    )
    multiples = st.builds(
        lambda of: {"type": kind, "minimum": 0, "maximum": 500, "multipleOf": of},
        st.integers(1, 40),
    )
    return st.one_of(bounds, multiples)


def _texts() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    )
    patterns = st.sampled_from(["^[a-z]{1,4}$", "^(yes|no)$", "^[0-9]{2}-[0-9]{2}$", "^a?b+c{2}$"])
    formats = st.sampled_from(["ipv4", "uuid"])
    return st.one_of(
        lengths,
        patterns.map(lambda one: {"type": "string", "pattern": one}),
        formats.map(lambda one: {"type": "string", "format": one}),
    )


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], optional: set[str], more: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "additionalProperties": more}
        if more is not False:  # one property more; llguidance counts only beside required ones
            schema["maxProperties"] = len(properties) + 1
            optional = set()
        return schema | {"required": [name for name in properties if name not in optional]}

    properties = st.dictionaries(NAMES, inner, max_size=3)
    more = st.one_of(st.just(False), st.just(False), inner)
    return st.builds(made, properties, st.sets(NAMES, max_size=3), more)


def _lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def made(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda first: {
            "type": "array",
            "prefixItems": first,
            "items": False,
            "minItems": len(first),
        }
    )
    return st.one_of(st.builds(made, inner, st.integers(0, 2), st.integers(0, 1)), tuples)


def _joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    nullable = inner.map(lambda one: {"anyOf": [one, {"type": "null"}]})
    tree = inner.map(
        lambda value: {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": value,
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        }
    )
    # references are resolved from the root, so a schema with them is never an inner one
    return st.one_of(choices, nullable, tree)


LEAVES = st.one_of(
    _numbers("integer"),
    _numbers("number"),
    _texts(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr).map(lambda some: {"enum": some}),
    SCALARS.map(lambda one: {"const": one}),
)
INNER = st.recursive(LEAVES, lambda inner: st.one_of(_objects(inner), _lists(inner)), max_leaves=5)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of any kind of value."""
    return st.one_of(_objects(INNER), _lists(INNER), _joined(INNER), INNER)
