"""Grammars allow what their source describes: JSON-Schema-Test-Suite, bad sources, tags."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.grammar.constraint import MAX_ORIGINALS, MIN_PARALLEL, Constraint, fill_masks
from jaxinfer.text.tokenizer import load_tokenizer
from kit.cpu_time import cpu_seconds
from kit.tokenizers import TINY_EOS_ID, tiny_tokenizer_spec

SUITE = Path(__file__).parents[1] / "data" / "json_schema" / "draft2020-12.json.gz"
CASES = json.loads(gzip.decompress(SUITE.read_bytes()))
# Keywords that are refused by name; the others, in all combinations, are followed.
REFUSED = {
    *("contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
    *("if", "then", "else", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("uniqueItems", "oneOf", "$dynamicAnchor", "$dynamicRef"),
}
OTHER_REASONS = ("Unsatisfiable", "not disjoint", "Unknown format", "too many digits")
# Valid values that are never written: 1.0 for 1, keys in another order than the schema's, and
# texts that a format's name excludes.
NEVER_WRITTEN = 22


def new_compiler() -> ConstraintCompiler:
    return ConstraintCompiler(load_tokenizer(tiny_tokenizer_spec()), 320, (TINY_EOS_ID,))


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return new_compiler()


def compiled(compiler: ConstraintCompiler, **form: Any) -> Constraint:
    constraint = compiler.compile(SamplingParams(structured_outputs=form))  # type: ignore[arg-type]
    assert constraint is not None
    return constraint


def accepts(constraint: Constraint, text: str) -> bool:
    try:
        constraint.begin([*text.encode(), TINY_EOS_ID])
    except ValueError:
        return False
    return True


def test_suite_of_json_schema(compiler: ConstraintCompiler) -> None:
    followed = missing = 0
    forms: list[Any] = [{"json": json.dumps(schema)} for _, _, schema, _ in CASES]
    found = [compiler.submit(SamplingParams(structured_outputs=form)) for form in forms]
    for (file, what, _, tests), one in zip(CASES, found, strict=True):
        try:
            constraint = one.result()
            assert constraint is not None
        except RequestError as error:
            words = {word.strip('",') for word in str(error).split()}
            assert words & REFUSED or any(one in str(error) for one in OTHER_REASONS), (file, error)
            continue
        followed += 1
        for value, valid in tests:
            if accepts(constraint, json.dumps(value, ensure_ascii=False)) != valid:
                assert valid, f"{file}: {what}: {value} is not valid, and was allowed"
                missing += 1
    assert followed == 220 and missing == NEVER_WRITTEN


ENDLESS = {
    "through a property": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
        },
    },
    "itself": {"$ref": "#"},
    "through a list": {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
        "required": ["x"],
    },
    "through two": {
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
    },
}
# it allows any number of a up to 9 ** 8
EXPLODING = "(" * 8 + "a" + "{0,9})" * 8
BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{f"endless: {name}": ({"json": schema}, "never ends") for name, schema in ENDLESS.items()},
    "contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    "two types": ({"json": {"allOf": [{"type": "null"}, {"type": "array"}]}}, "incompatible types"),
    "unknown type": ({"json": {"type": "banana"}}, "Invalid type: banana"),
    "unsupported": ({"json": {"uniqueItems": True, "not": {}}}, 'not supported: "not", "uniqueIt'),
    "lenient": ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not supported"),
    "missing reference": ({"json": {"$ref": "#/nope"}}, "does not exist"),
    "deep": ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "at most 128 levels"),
    "no JSON": ({"json": '{"type":'}, "not valid JSON"),
    "no schema": ({"json": "[1]"}, "must be a JSON schema"),
    "regex": ({"regex": "a("}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "regex of nothing": ({"regex": "[^\\s\\S]"}, "fits no text"),
    "exploding regex": ({"regex": EXPLODING}, "too complex"),
    "undefined rule": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "undefined GBNF rule": ({"grammar": 'root ::= foo "a"'}, "Rule 'foo' not found"),
    "no start": ({"grammar": 'foo: "a"'}, "no start rule found"),
    "endless grammar": ({"grammar": 'start: start "a"'}, "fits no text"),
    "dead end": (
        {"grammar": 'start: "a" ("," NONE)?\nNONE: /x/ & /y/'},
        "has a beginning after which no text fits",
    ),
    "unknown tag": ({"structural_tag": {"format": {"type": "x"}}}, "the type 'x'"),
    "no trigger": (
        {
            "structural_tag": {
                "triggers": ["<a"],
                "structures": [{"begin": "<b", "schema": {}, "end": ">"}],
            }
        },
        "no trigger begins",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sources_are_refused_by_field(compiler: ConstraintCompiler, name: str) -> None:
    form, reason = BAD[name]
    (kind,) = form
    with pytest.raises(RequestError) as caught:
        compiled(compiler, **form)
    assert str(caught.value).startswith(f"structured_outputs.{kind} ")
    assert reason in str(caught.value)


def test_masks_in_parallel_are_those_of_each_filter(compiler: ConstraintCompiler) -> None:
    """One of them fails: its matcher has been given a token that its regex does not allow."""
    constraint = compiled(compiler, regex="a[b-x]{2}y")
    texts = ("a", "", "ab", "abc", "abcy", "a")
    filters = {2 * row: constraint.begin([*text.encode()]) for row, text in enumerate(texts)}
    failed = 2 * (len(texts) - 1)
    with pytest.raises(ValueError):
        filters[failed].push(ord("z"))
    assert sum(one.matcher_to_ask is not None for one in filters.values()) >= MIN_PARALLEL
    masks = np.full((12, 10), 7, np.uint32)
    assert fill_masks(filters, masks).keys() == {failed}
    for row, one in filters.items():
        if row != failed:
            expected = np.zeros(10, np.uint32)
            one.fill(expected)
            assert (masks[row] == expected).all() and (masks[row + 1] == 7).all()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_filters_of_all_kinds_together_are_as_each_alone(
    compiler: ConstraintCompiler, ignore_eos: bool
) -> None:
    """Grammars, some at their end, with bad words, and allowed ids; one gets a wrong token."""
    settings = [
        *(
            {"structured_outputs": {"regex": form}}
            for form in ("[a-c]{2,3}", "ab", "[abx]+", "abc")
        ),
        {"structured_outputs": {"regex": "[a-c]+"}, "bad_words": ["bb"]},
        {"allowed_token_ids": [*b"abc"]},
        {"structured_outputs": {"regex": "[a-c]{1,9}"}},
    ]
    constraints = [
        compiler.compile(SamplingParams(ignore_eos=ignore_eos, **one))  # type: ignore[arg-type]
        for one in settings
    ]
    together = {3 * row: one.begin([]) for row, one in enumerate(constraints) if one}
    alone = {3 * row: one.begin([]) for row, one in enumerate(constraints) if one}
    assert len(together) == len(settings)
    masks, expected = np.zeros((2, 20, 10), np.uint32)
    wrong = 6  # of the row "[abx]+"
    for token in b"ab":
        for key in list(together):
            own = ord("z") if (key, token) == (wrong, ord("b")) else token
            if own != token:
                with pytest.raises(ValueError):
                    together[key].push(own)
                continue
            together[key].push(token)
            alone[key].push(token)
            alone[key].fill(expected[key])
        errors = fill_masks(together, masks)
        assert errors.keys() == ({wrong} if token == ord("b") else set())
        masks[wrong] = expected[wrong] = 0
        assert (masks == expected).all()
    assert masks[3].any(), "a complete text may only end"


def test_copies_come_from_several_matchers_and_have_the_same_masks(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "jaxinfer.text.grammar.constraint.MAX_SECONDS_OF_ORIGINAL"
    monkeypatch.setattr(limit, 60.0)  # on a busy machine, too
    form = {"json": {"type": "object", "properties": {"a": {"enum": ["b", "cd"]}}}}
    constraints = [compiled(compiler, **form) for _ in range(MAX_ORIGINALS + 4)]
    grammar = constraints[0].grammar
    assert grammar is not None and len(grammar._originals) == MAX_ORIGINALS
    filters = dict(enumerate(one.begin([*b'{"a":"']) for one in constraints))
    masks = np.zeros((len(filters), 10), np.uint32)
    assert not fill_masks(filters, masks)
    assert masks.any() and (masks == masks[0]).all()
    filters[0].push(ord("b"))
    fill_masks(filters, masks)
    assert (masks[0] != masks[1]).any() and (masks[1:] == masks[1]).all()


def test_sources_that_would_take_hours_are_refused_in_two_seconds() -> None:
    compiler = new_compiler()
    patterns = {f"^a{number}[a-z]+$": {"type": "null"} for number in range(3000)}
    begin = cpu_seconds()
    with pytest.raises(RequestError, match="takes more than 0.75 s to compile"):
        compiled(compiler, json={"patternProperties": patterns})
    compiler.close()  # the time of processes counts once they have ended
    # The kernel counts the timer in ticks: of 90 timers on busy cores some ended after 0.70 s.
    assert 0.6 <= cpu_seconds() - begin < 2


def test_recursive_schemas_that_end(compiler: ConstraintCompiler) -> None:
    tree = {"type": "object", "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}
    constraint = compiled(compiler, json=tree)
    assert accepts(constraint, '{"x": {"x": {}}}') and not accepts(constraint, '{"y": {}}')


def test_options_of_schemas(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    spaced, more = '{"a": 1}', '{"a":1,"b":2}'
    assert accepts(compiled(compiler, json=schema), spaced)
    assert accepts(compiled(compiler, json=schema), more)
    tight = compiled(compiler, json=schema, disable_any_whitespace=True)
    assert not accepts(tight, spaced) and accepts(tight, more)
    closed = compiled(compiler, json=schema, disable_additional_properties=True)
    assert accepts(closed, spaced) and not accepts(closed, more)
    assert not accepts(compiled(compiler, json=schema), '{"a":' + " " * 40 + "1}")
    wide = compiled(compiler, json=schema, whitespace_pattern=" {50}")
    assert accepts(wide, '{"a":' + " " * 50 + "1}")


TRIGGERED = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|user|>", "<f"],
        "tags": [
            {
                "begin": "<|user|>x",
                "content": {"type": "regex", "pattern": "a/b"},
                "end": "<|system|>",
            },
            {"begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"},
        ],
        "at_least_one": True,
    }
}


def test_triggered_tags(compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, structural_tag=TRIGGERED)
    assert accepts(constraint, "text <f>anything</f> more <f></f>")
    assert not accepts(constraint, "text")
    assert accepts(constraint, "<f>a</f> <g>") and not accepts(constraint, "<f>a</f> <f")
    special = compiler._tokenizer.convert_tokens_to_ids  # type: ignore[union-attr]
    user, system = special("<|user|>"), special("<|system|>")
    constraint.begin([*b"hi ", user, *b"xa/b", system, TINY_EOS_ID])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="grammar"):
        constraint.begin([*b"hi ", user, *b"y"])  # type: ignore[list-item]


def test_grammars_are_compiled_once(compiler: ConstraintCompiler) -> None:
    first, again = (compiled(compiler, regex="[a-c]+") for _ in range(2))
    assert first.grammar is again.grammar
    assert compiled(compiler, regex="[a-d]+").grammar is not first.grammar
