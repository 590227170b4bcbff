"""Arguments that a model writes as text have the types that the whole schema gives them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.text.answers.argument_types import typed

ROOT = {
    "$defs": {
        "Place": {"type": "object", "properties": {"street": {"type": "string"}}},
        "Count": {"type": "integer"},
        "Unit": {"type": "string", "enum": ["celsius", "7"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b~c": {"type": "boolean"},
    }
}
PLACE, COUNT = {"$ref": "#/$defs/Place"}, {"$ref": "#/$defs/Count"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (PLACE, '{"street": "Main"}', {"street": "Main"}),
        (COUNT, "7", 7),
        ({"allOf": [COUNT]}, "7", 7),
        ({"anyOf": [PLACE, {"type": "null"}]}, '{"street": "a"}', {"street": "a"}),
        ({"anyOf": [PLACE, {"type": "null"}]}, "null", None),
        ({"oneOf": [COUNT, {"type": "string"}]}, "x", "x"),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"$ref": "#/$defs/missing"}, "7", "7"),
        ({"$ref": "elsewhere.json"}, "7", "7"),
        ({"$ref": "#/$defs/a~1b~0c"}, "true", True),
        ({"$ref": "#/$defs/Unit"}, "7", "7"),
        ({"enum": [1, 2, 3]}, "2", 2),
        ({"enum": ["1", 2, None, True]}, "1", "1"),
        ({"enum": ["1", 2, None, True]}, "2", 2),
        ({"enum": ["1", 2, None, True]}, "true", True),
        ({"const": 5}, "5", 5),
        ({"const": [1]}, "[1]", [1]),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"additionalProperties": True}, "{}", {}),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": ["string", "integer"]}, "02134", "02134"),
        ({"type": ["integer", "string"]}, "02134", 2134),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "null", None),
        ({"enum": [1, 2]}, "None", None),
        ({"type": ["integer", "null"]}, "", None),
        ({"type": ["string", "null"]}, "", ""),
        ({"type": "array"}, "", ""),
        ({}, "null", "null"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
        ({"type": "array"}, "['x', (1, 2)]", "['x', (1, 2)]"),  # no value of JSON
        ({"type": "array"}, "['x', -1.5]", ["x", -1.5]),
        ({"type": "object"}, "{'a': f()}", "{'a': f()}"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "integer"}, "3.0", 3),
        ({}, "7", "7"),
        (True, "7", "7"),
    ],
)
def test_a_text_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    found = typed(text, schema, ROOT)
    assert found == value and type(found) is type(value)
