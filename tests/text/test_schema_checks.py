"""Checks of schemas: whether they end, how deep they are, and in how many steps that is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.errors import RequestError
from jaxinfer.text.grammar import schema as checks
from jaxinfer.text.grammar.schema import check_schema, resolved

NAMES = st.sampled_from("abcd")
REFS = NAMES.map(lambda name: {"$ref": f"#/$defs/{name}"})


def _inner(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(one, max_size=3)
    named = st.dictionaries(NAMES, one, max_size=3)
    return st.one_of(
        st.fixed_dictionaries({"anyOf": some}),
        st.fixed_dictionaries({"allOf": some, "oneOf": some}),
        st.fixed_dictionaries({"$ref": st.just("#/$defs/a"), "allOf": some}),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["object", ["object", "array"], ["object", "null"]])},
            optional={
                "properties": named,
                "required": st.lists(NAMES, max_size=2),
                "additionalProperties": one,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "minItems": st.integers(0, 2)},
            optional={"items": one, "prefixItems": some},
        ),
    )


LEAVES = st.one_of(REFS, REFS, st.just({"type": "null"}), st.just({"enum": [1]}), st.just({}))
SCHEMAS = st.recursive(LEAVES, _inner, max_leaves=6)
DOCUMENTS = st.builds(
    lambda definitions, root: {**root, "$defs": definitions},
    st.fixed_dictionaries({name: SCHEMAS for name in "abcd"}),
    SCHEMAS,
)


def ends_by_definition(root: Any) -> bool:
    """Rounds over all references, until a round finds none that ends."""
    known: set[str] = set()

    def ends(schema: Any) -> bool:
        if not isinstance(schema, dict):
            return True
        if "$ref" in schema and schema["$ref"] not in known:
            return False
        if not all(map(ends, schema.get("allOf", []))):
            return False
        for name in ("anyOf", "oneOf"):
            if schema.get(name) and not any(map(ends, schema[name])):
                return False
        if "enum" in schema:
            return True
        kinds = schema.get("type", "null")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        is_object = all(ends(named.get(name, others)) for name in schema.get("required", []))
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        items = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        by_kind = {"object": is_object, "array": all(map(ends, items))}
        return any(by_kind.get(kind, True) for kind in kinds)

    refs = [f"#/$defs/{name}" for name in "abcd"]
    while found := {ref for ref in refs if ref not in known and ends(resolved(root, ref))}:
        known |= found
    return ends(root)


@given(DOCUMENTS)
def test_a_schema_ends_as_by_definition(document: dict[str, Any]) -> None:
    assert checks._ends(document) == ends_by_definition(document)


def _cycle(size: int) -> dict[str, Any]:
    """Each definition needs the one before, of which only the last one in the document ends."""
    parts = {
        str(number): {
            "type": "object",
            "properties": {"a": {"$ref": f"#/{number + 1}"}},
            "required": ["a"],
        }
        for number in range(size)
    }
    return {"anyOf": [{"$ref": f"#/{i}"} for i in range(size)], **parts, str(size): {"const": 1}}


def _spelt(size: int) -> dict[str, Any]:
    """References to one part, each spelt differently, and to the parts of that."""
    refs = ["#/big" + "%67" * (i % 2) + "/" * i for i in range(size // 10)]
    big = {"properties": {str(i): {"items": {"type": "null"}} for i in range(size)}}
    return {"anyOf": [{"$ref": ref} for ref in refs], "big": big, "bigg": big}


MANY: dict[str, Callable[[int], dict[str, Any]]] = {
    "a cycle": _cycle,
    "required": lambda n: {"type": "object", "required": ["a"] * n, "properties": {"a": {}}},
    "items": lambda n: {"type": "array", "minItems": n, "prefixItems": [{}] * n},
    "choices": lambda n: {"anyOf": [{"$ref": "#"}] * n},
    "spellings": _spelt,
}


def num_calls(schema: Any) -> int:
    """Calls and returns of functions while a schema is checked."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        check_schema(schema)
    except RequestError:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", MANY)
def test_the_steps_of_a_check_are_proportional_to_the_size(name: str) -> None:
    few, many = (num_calls(MANY[name](size)) for size in (200, 1600))
    assert many < 12 * few


def chain(size: int) -> dict[str, Any]:
    parts = {str(i): {"items": {"$ref": f"#/{i + 1}"}} for i in range(size)}
    return {**parts, str(size): {}, "$ref": "#/0"}


def test_depth_is_counted_through_references() -> None:
    check_schema(chain(700))
    with pytest.raises(RequestError, match="is 1602 schemas deep, counted through its references"):
        check_schema(chain(800))
    tree = {"properties": {str(i): {"$ref": f"#/$defs/{i % 99}"} for i in range(300)}}
    check_schema({"$defs": {str(i): {"items": {"$ref": "#"}, **tree} for i in range(99)}, **tree})


def test_references_name_parts_of_the_document() -> None:
    root = {"a/b": [{"c%d": 1}, 2], "": 3}
    assert resolved(root, "#/a~1b/0/c%25d") == 1
    assert resolved(root, "#/a~1b/1") == 2 and resolved(root, "#") == root
    for ref in ("#/a~1b/2", "#/a~1b/-1", "#/a~1b/²", "#/a~1b/" + "9" * 5000, "#/x", "other"):
        assert resolved(root, ref) is True
