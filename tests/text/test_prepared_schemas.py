"""Schemas whose keywords are annotations, other words for what llguidance follows, or dead ends."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from jaxinfer.core.errors import RequestError

pytest.importorskip("llguidance")
from kit.grammar_walks import Form

TEXT = {"type": "string"}
WHOLE = {"type": "integer"}

ANNOTATIONS: list[dict[str, Any]] = [
    *({**TEXT, "format": name} for name in ("password", "phone", "uri-reference", "binary", "x")),
    {**TEXT, "$comment": "c", "contentEncoding": "base64", "deprecated": True, "x-vendor": 1},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "minContains": 2},
    {"type": "array", "contains": WHOLE, "minContains": 0},
    {"type": "object", "dependentRequired": {}, "dependentSchemas": {"a": True}},
    {"type": "object", "unevaluatedProperties": True, "propertyNames": {}},
    {"type": "boolean", "not": False, "if": {"const": True}, "$dynamicAnchor": "a"},
    {"type": "boolean", "then": False},
]


@pytest.mark.parametrize("schema", ANNOTATIONS, ids=json.dumps)
def test_keywords_that_demand_nothing(schema: dict[str, Any]) -> None:
    values = {"string": '"a"', "array": "[1, 1]", "object": '{"b": 1}', "boolean": "false"}
    assert Form(json=schema).accepts(values[schema["type"]])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": WHOLE},
        {"not": {"const": 1}},
        {"if": True, "then": {"const": 1}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "properties": {"a": WHOLE}, "propertyNames": {"maxLength": 1}},
    ],
    ids=json.dumps,
)
def test_keywords_that_limit_values_are_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="keywords are not supported: .*") as caught:
        Form(json=schema)
    assert any(f'"{name}"' in str(caught.value) for name in schema)


def of_kind(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, "x": WHOLE},
        "required": ["kind"],
        "additionalProperties": False,
        **fields,
    }


CAT, DOG = {"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}
DEFS = {
    "Cat": of_kind("cat"),
    "Dog": of_kind("dog"),
    "Same": CAT,
    "Pet": {"oneOf": [CAT, DOG]},
    "Bird": of_kind("bird", required=[]),
    "Fish": of_kind("fish", required=[]),
    "Tree": {
        "type": "object",
        "properties": {"kind": {"const": "tree"}, "x": {"oneOf": [{"$ref": "#/$defs/Tree"}, DOG]}},
        "required": ["kind"],
    },
}
ONE_OF: dict[str, dict[str, Any]] = {
    "references": {"oneOf": [CAT, DOG]},
    "discriminator": {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
    "reference to a reference": {"oneOf": [{"$ref": "#/$defs/Same"}, DOG]},
    "in allOf": {"allOf": [{"oneOf": [CAT, DOG]}]},
    "of allOf": {"oneOf": [{"allOf": [CAT, {"required": ["kind"]}]}, DOG]},
    "in a definition": {"$ref": "#/$defs/Pet"},
    "of a oneOf": {"oneOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}]},
    "next to anyOf": {"anyOf": [CAT, DOG], "oneOf": [DOG, CAT]},
    "a property with a default": {"oneOf": [{"$ref": "#/$defs/Bird"}, {"$ref": "#/$defs/Fish"}]},
    "within itself": {"oneOf": [{"$ref": "#/$defs/Tree"}, DOG]},
}


@pytest.mark.parametrize("name", ONE_OF)
def test_one_of_schemas_that_constants_tell_apart(name: str) -> None:
    schema = {**ONE_OF[name], "$defs": DEFS}
    form, validator = Form(json=schema), jsonschema_rs.validator_for(schema)
    kinds = ("cat", "dog", "bird", "fish", "tree")
    valid = [one for kind in kinds if validator.is_valid(one := {"kind": kind})]
    assert len(valid) == 2
    for kind in kinds:
        assert form.accepts(json.dumps({"kind": kind})) == ({"kind": kind} in valid)
    assert not form.accepts("{}")


@pytest.mark.parametrize(
    "choices",
    [[CAT, CAT], [WHOLE, {"type": "number"}], [{"required": ["a"]}, {"required": ["b"]}]],
    ids=json.dumps,
)
def test_other_one_ofs_are_refused_with_a_remedy(choices: list[Any]) -> None:
    with pytest.raises(RequestError, match="oneOf is only possible .*; use anyOf"):
        Form(json={"oneOf": choices, "$defs": DEFS})


def test_one_of_constants() -> None:
    form = Form(json={"oneOf": [{"const": 1}, {"enum": [2, True]}, {"const": "a"}]})
    assert all(map(form.accepts, ("1", "2", "true", '"a"'))) and not form.accepts("3")


def scored(**fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"score": WHOLE},
        "required": ["score"],
        "additionalProperties": False,
        **fields,
    }


@pytest.mark.parametrize(
    "patterns",
    [
        {"^score$": WHOLE},
        {"^(score)$": {}},
        {"^sco[r]e$": {"minimum": 1}},
        {r"[^\s\S]": WHOLE},
        {"^score$": WHOLE, r"^[^\s\S]$": WHOLE},
    ],
    ids=json.dumps,
)
def test_patterns_of_declared_properties(patterns: dict[str, Any]) -> None:
    """No further property fits them, so none may begin."""
    form = Form(json=scored(patternProperties=patterns))
    walks = [form.walk(seed, stop=0.1) for seed in range(8)]
    assert {one.end for one in walks} <= {"ended", "long"} and form.accepts('{"score": 5}')
    assert not any(b"," in one.text for one in walks)
    assert form.accepts('{"score": -5}') == (patterns.get("^sco[r]e$") is None)


def test_a_pattern_of_other_properties_too() -> None:
    form = Form(json=scored(patternProperties={"^sc": WHOLE}))
    assert form.accepts('{"score": 1, "scale": 2}') and not form.accepts('{"score": 1, "a": 2}')


def test_property_names() -> None:
    form = Form(json={"propertyNames": {"pattern": "^a"}, "type": "object"})
    assert form.accepts('{"ab": 1}') and not form.accepts('{"b": 1}')
    named = {"enum": ["p", "q"], "type": "string"}
    form = Form(json={"type": "object", "propertyNames": named, "additionalProperties": WHOLE})
    assert form.accepts('{"q": 1}') and not form.accepts('{"r": 1}')


LOOP = {"type": "object", "properties": {"t": {"$ref": "#/$defs/loop"}}, "required": ["t"]}


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/loop"}}}, "{}"),
        ({"type": "array", "items": {"$ref": "#/$defs/loop"}}, "[]"),
        ({"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}, "null"),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/loop"}}, "{}"),
    ],
)
def test_parts_that_would_never_end_are_not_begun(schema: dict[str, Any], least: str) -> None:
    form = Form(json={**schema, "$defs": {"loop": LOOP}})
    assert form.accepts(least)
    assert all(form.walk(seed, stop=0.1).end == "ended" for seed in range(4))


CLOSED: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "named": ({"properties": {"a": WHOLE}}, {'{"a": 1}': True, '{"b": 1}': False}),
    "nothing": ({"properties": {}}, {"{}": True, '{"b": 1}': False}),
    "unnamed": ({}, {'{"b": 1}': True}),
    "open": ({"properties": {}, "additionalProperties": True}, {'{"b": 1}': True}),
    "nested": (
        {"properties": {"a": {"type": "array", "items": {"properties": {"b": WHOLE}}}}},
        {'{"a": [{"b": 1}]}': True, '{"a": [{"c": 1}]}': False},
    ),
    "required": (
        {"properties": {}, "required": ["b"]},
        {'{"b": 1}': True, '{"b": 1, "c": 1}': False},
    ),
    "parts": (
        {"properties": {"a": WHOLE}, "allOf": [{"properties": {"b": WHOLE}}]},
        {'{"a": 1, "b": 1}': True, '{"a": 1, "c": 1}': False},
    ),
    "choices": (
        {"properties": {"a": WHOLE}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {'{"a": 1}': True, '{"b": 1}': True, '{"a": 1, "c": 1}': False},
    ),
    "reference": (
        {"allOf": [{"$ref": "#/$defs/d"}], "$defs": {"d": {"properties": {"a": WHOLE}}}},
        {'{"a": 1}': True, '{"c": 1}': False},
    ),
    "data": (
        {"properties": {"a": {"const": {"properties": 1}}}},
        {'{"a": {"properties": 1}}': True},
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_objects(name: str) -> None:
    schema, texts = CLOSED[name]
    form = Form(json={"type": "object", **schema}, disable_additional_properties=True)
    assert {text: form.accepts(text) for text in texts} == texts


# random schemas, of which many are contradictory

PATTERNS = ["^a$", "^a", "^[ab]$", "^z", "a", "", "^(a|b)$", r"[^\s\S]"]
OTHERS: list[Any] = [True, {}, {"enum": ["a", "b", "ab"], "maxLength": 1}, {"const": 1.5}]
OTHERS += [{"enum": [1, "a", None]}, {"enum": [{"a": 1}, [1]]}, {"type": ["integer", "object"]}]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    def some(chance: float, **fields: Any) -> dict[str, Any]:
        return {name: make() for name, make in fields.items() if rng.random() < chance}

    def inner() -> Any:
        return random_schema(rng, depth + 1)

    match rng.randrange(12 if depth < 3 else 5):
        case 0:
            low, high = some(0.5, minimum=lambda: rng.randrange(9)), some(0.5, maximum=lambda: 5)
            return {"type": "integer", **low, **high, **some(0.3, multipleOf=lambda: 3)}
        case 1:
            sizes = some(0.5, minLength=lambda: rng.randrange(4), maxLength=lambda: 3)
            return {**TEXT, **sizes, **some(0.4, pattern=lambda: rng.choice(PATTERNS))}
        case 2:
            return rng.choice(OTHERS) if depth else {"type": "boolean"}
        case 3 | 4:
            return {"$ref": f"#/$defs/{rng.choice('xy')}"}
        case 5 | 6 | 7:
            return {
                "type": "object",
                "properties": some(0.7, a=inner, b=inner),
                **some(0.5, required=lambda: [one for one in "abc" if rng.random() < 0.4]),
                **some(0.6, additionalProperties=lambda: rng.choice([False, True, inner()])),
                **some(0.3, patternProperties=lambda: {rng.choice(PATTERNS): inner()}),
                **some(0.1, minProperties=lambda: 1),
            }
        case 8:
            sizes = some(0.5, minItems=lambda: rng.randrange(3), maxItems=lambda: rng.randrange(3))
            firsts = some(0.3, prefixItems=lambda: [inner()])
            return {"type": "array", **some(0.7, items=inner), **firsts, **sizes}
        case number:
            name = ("anyOf", "oneOf", "allOf")[number % 3]
            return {name: [inner() for _ in range(rng.randrange(1, 3))]}


def check_random_schema(seed: int) -> bool:
    """Texts of a random schema end, or go on, and are valid; False if the schema is refused."""
    rng = random.Random(seed)
    tree = {"type": "object", "properties": {"a": {"$ref": "#/$defs/y"}}}
    root = random_schema(rng)
    schema = {
        **(root if isinstance(root, dict) else {}),
        "$defs": {"x": random_schema(rng, 2), "y": tree},
    }
    try:
        form = Form(json=schema, disable_additional_properties=seed % 4 == 0)
    except RequestError:
        return False
    validator = jsonschema_rs.validator_for(schema)
    for number in range(5):
        end, text = form.walk(number, longest=150)
        assert end != "dead", (schema, text)
        # a number beyond every float is no JSON
        if end == "ended" and not re.search(rb"[eE]\+?\d{3}", text):
            assert validator.is_valid(json.loads(text)), (schema, text)
    return True


def test_random_schemas_have_no_dead_ends() -> None:
    assert sum(map(check_random_schema, range(120))) > 60


@pytest.mark.nightly
def test_many_random_schemas_have_no_dead_ends() -> None:
    assert sum(map(check_random_schema, range(1000, 6000))) > 2500
