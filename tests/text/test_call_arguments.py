"""Arguments of enforced calls follow their schemas in every form of calls, or are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.text.answers.formats import answer_format
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.answers.structure import calls_tag, strict_tag
from jaxinfer.text.tool_texts import written_calls

pytest.importorskip("llguidance")
from kit.answer_parts import calls_of
from kit.grammar_walks import Form

STYLES = ["qwen3_coder", "glm45", "deepseek_v32", "gemma4", "pythonic", "hermes"]
TEXT = {"type": "string"}
DEFS: dict[str, Any] = {
    "Unit": {**TEXT, "enum": ["celsius", "fahrenheit"]},
    "Short": {**TEXT, "maxLength": 3},
    "Point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {**TEXT, "maxLength": 2}},
        "required": ["x"],
    },
    "A": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
    "B": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
}
UNIT, SHORT, POINT = ({"$ref": f"#/$defs/{name}"} for name in ("Unit", "Short", "Point"))
HELD: dict[str, Any] = {
    "reference to an enum": UNIT,
    "reference to a length": SHORT,
    "length": {**TEXT, "minLength": 2, "maxLength": 4},
    "pattern": {**TEXT, "pattern": "^[0-9]{1,5}$"},
    "pattern within": {**TEXT, "pattern": "a", "maxLength": 2},
    "constant": {**TEXT, "const": "xyz"},
    "all of a type": {"allOf": [{"type": "integer"}]},
    "all of lengths": {"allOf": [SHORT, {"minLength": 2}]},
    "or null": {"anyOf": [SHORT, {"type": "null"}]},
    "pattern or null": {"type": ["string", "null"], "pattern": "^a{1,3}$"},
    "date": {**TEXT, "format": "date"},
    "uuid": {**TEXT, "format": "uuid"},
    "constants of all types": {"enum": ["", 1, None, "a b"]},
    "choices of texts": {"oneOf": [{"const": "a"}, {"enum": ["b", "cd"]}]},
    "choices of objects": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    "object": POINT,
    "one object": {"type": "array", "items": POINT, "maxItems": 1},
    "unknown keywords": {"type": "boolean", "x-order": 1, "enumNames": ["y", "n"]},
}


def function(schema: Any, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFS}
    return {"name": "f", "parameters": parameters, **fields}


def form_of(style: str, called: dict[str, Any], make: Any = calls_tag) -> Form:
    found = answer_format("", tool_call_parser=style)
    assert found is not None and found.calls is not None
    return Form(structural_tag=make(found.calls, [called], parallel=False))


def arguments(style: str, called: dict[str, Any], text: str) -> Any:
    """The arguments of an answer's call."""
    found = answer_format("", tool_call_parser=style)
    assert found is not None
    parser = AnswerParser(found.template, "", tools={"f": called["parameters"]})
    (call,) = calls_of([*parser.feed(text), *parser.finish()])
    assert call.is_whole, text
    return json.loads(call.arguments)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("style", STYLES)
def test_arguments_follow_their_schema(style: str, name: str) -> None:
    for called in (function(HELD[name], strict=True), function(HELD[name])):
        form = form_of(style, called)
        walks = [form.walk(seed, longest=700, stop=1) for seed in range(3)]
        assert "dead" not in {one.end for one in walks}
        texts = [one.text.decode() for one in walks if one.end == "ended"]
        # a number beyond every float is no JSON
        texts = [one for one in texts if not re.search(r"[eE]\+?\d{3}", one)]
        assert texts
        for text in texts:
            jsonschema_rs.validate(called["parameters"], arguments(style, called, text))


NOT_HELD: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"const": "a"}}, "keyword not "),
    "if": ({"if": {"const": 1}, "then": {"const": 2}}, "keyword (if|then) "),
    "unique items": ({"type": "array", "uniqueItems": True}, "keyword uniqueItems"),
    "pattern": ({**TEXT, "pattern": "^(?!a)b"}, "keyword pattern"),
}


@pytest.mark.parametrize("name", NOT_HELD)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_not_held_is_refused_if_strict(style: str, name: str) -> None:
    schema, words = NOT_HELD[name]
    for make in (calls_tag, strict_tag):
        with pytest.raises(RequestError, match=words) as caught:
            form_of(style, function(schema, strict=True), make)
        assert "function 'f'" in str(caught.value)
    assert form_of(style, function(schema)).walk(0, longest=99).end != "dead"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [SHORT, {"type": "integer"}]}, "keyword maxLength"),
        ({"anyOf": [{"type": "integer", "minimum": 5}, TEXT]}, "keyword minimum"),
        ({"oneOf": [SHORT, {**TEXT, "minLength": 2}]}, "keyword oneOf"),
        ({**TEXT, "pattern": "(^a|b$)"}, "keyword pattern"),
    ],
    ids=json.dumps,
)
def test_limits_that_a_text_between_tags_cannot_have(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"the argument 'v' of the function 'f': .*{words}"):
        form_of("qwen3_coder", function(schema, strict=True))
    assert form_of("qwen3_coder", function(schema)).walk(0, longest=99).end != "dead"


def test_contradictory_texts_are_refused() -> None:
    for schema in ({**TEXT, "minLength": 5, "maxLength": 2}, {"enum": ["a"], "pattern": "b"}):
        for style in ("qwen3_coder", "gemma4", "hermes"):
            with pytest.raises(RequestError, match="no text fits|Unsatisfiable"):
                form_of(style, function(schema))


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45", "deepseek_v32"])
def test_a_limited_text_has_no_marks_of_arguments(style: str) -> None:
    """It would be read as the end of the argument, or as another one."""
    found = answer_format("", tool_call_parser=style)
    assert found is not None and found.calls is not None
    form = form_of(style, function({**TEXT, "maxLength": 30}))
    begin = found.calls.argument_begin.replace("{name}", "v").replace("{string}", "true")
    before = found.calls.before + found.calls.begin.replace("{name}", "f") + begin
    after = found.calls.argument_end + found.calls.end + found.calls.after
    assert form.accepts(f"{before}one\ntwo{after}")
    mark = found.calls.argument_end.strip()
    assert not form.accepts(f"{before}one{mark}two{after}")


@pytest.mark.parametrize("style", ["qwen3_coder", "gemma4", "hermes"])
def test_long_texts_of_functions_that_are_not_strict(style: str) -> None:
    """llguidance counts the characters of limited texts, of these more than it can follow."""
    texts = {f"a{number}": {**TEXT, "maxLength": 1000 + number} for number in range(8)}
    called = {"name": "f", "parameters": {"type": "object", "properties": texts}}
    found = answer_format("", tool_call_parser=style)
    assert found is not None and found.calls is not None
    values = {name: "a word " * 90 for name in texts}
    assert form_of(style, called).accepts(written_calls(found.calls, [("f", values)], 0))
    short = {"name": "f", "parameters": {"properties": {"a": {**TEXT, "maxLength": 20}}}}
    too_long = written_calls(found.calls, [("f", {"a": "a word " * 3})], 0)
    assert not form_of(style, short).accepts(too_long)


UNDECLARED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("make", [calls_tag, strict_tag])
@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [({}, False), ({"additionalProperties": True}, True), ({"additionalProperties": {}}, True)],
)
def test_undeclared_arguments(make: Any, fields: dict[str, Any], is_allowed: bool) -> None:
    inner = {**UNDECLARED, **fields}
    called = {"name": "f", "strict": True, "parameters": {**inner, "properties": {"a": inner}}}
    form = form_of("hermes", called, make)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert form.accepts(call % '{"a": {"a": 1}}')
    assert form.accepts(call % '{"a": {"b": 1}}') == is_allowed
    assert form.accepts(call % '{"b": 1}') == is_allowed


@pytest.mark.parametrize("style", STYLES)
def test_a_function_without_arguments_has_none(style: str) -> None:
    called = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    form = form_of(style, called)
    walks = [form.walk(seed, stop=1) for seed in range(3)]
    texts = {one.text.decode() for one in walks if one.end == "ended"}
    assert len(texts) > 0
    assert all(arguments(style, called, text) == {} for text in texts)


ODD: dict[str, Any] = {
    "constants of a type": {"allOf": [{"enum": [1, "a", None]}, {"type": ["null", "string"]}]},
    "constants within bounds": {"enum": [1, 2, 3], "minimum": 2},
    "choices of a type": {"anyOf": [{"enum": [1, 2]}, SHORT], "type": "string"},
    "no list": {"type": "array", "items": {}, "minItems": 1, "maxItems": 0},
    "a pattern that nothing fits": {
        "type": "object",
        "properties": {"a": {"type": "object"}},
        "patternProperties": {"^a$": False},
    },
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("style", STYLES)
def test_odd_arguments_follow_their_schema_or_are_refused(style: str, name: str) -> None:
    called = function(ODD[name], strict=True)
    try:
        form = form_of(style, called)
    except RequestError:
        return
    for walk in (form.walk(seed, longest=700, stop=1) for seed in range(3)):
        assert walk.end == "ended"
        jsonschema_rs.validate(called["parameters"], arguments(style, called, walk.text.decode()))


def test_a_number_beyond_every_float_is_read() -> None:
    called = function({"type": "integer"})
    call = "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
    assert arguments("glm45", called, call % ("7" * 400)) == {"v": int("7" * 400)}
