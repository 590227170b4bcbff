"""The forms that enforce calls: every text that they allow is read as calls of the tools."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import numpy as np
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams, Thinking
from jaxinfer.text.answers.formats import FORMATS, answer_format
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.answers.structure import calls_tag, strict_tag
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.grammar.thinking import ThoughtTracker
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.text.tool_texts import written_calls
from kit.answer_parts import ReadCall, calls_of, texts_of
from kit.answer_texts import WRITERS, Message
from kit.tokenizers import TINY_EOS_ID, TINY_VOCAB_SIZE, tiny_tokenizer_spec

pytest.importorskip("llguidance")
FUNCTIONS = {
    "clock": {"name": "clock"},
    "weather": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ENFORCED = [
    name
    for name in FORMATS
    if (found := answer_format("", tool_call_parser=name)) and found.calls and found.name == name
]
MOST_TOKENS = 700
DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜{0}>"
)
# calls of formats that ``WRITERS`` does not have, and of those of which it has another form
WRITTEN = {
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]',
    "deepseek_v32": DSML.format("function_calls"),
    "deepseek_v4": DSML.format("tool_calls"),
    "functiongemma": "<start_function_call>call:weather{city:<escape>Rom<escape>,days:3}"
    "<end_function_call>",
    "pythonic": '[weather(city="Rom", days=3)]',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Rom", "days": 3}',
}


def written(name: str) -> str:
    """A call of the weather in Rome, as models with this format write it."""
    if name in WRITTEN:
        return WRITTEN[name]
    call = WRITERS[name](Message(calls=(("weather", {"city": "Rom", "days": 3}),)))
    return call + "<|call|>" if name == "openai" else call


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(
        load_tokenizer(tiny_tokenizer_spec()), TINY_VOCAB_SIZE, (TINY_EOS_ID,)
    )


def constraint_of(
    compiler: ConstraintCompiler,
    name: str,
    *,
    parallel: bool = True,
    make=calls_tag,
    functions=FUNCTIONS,
    **fields,
):
    found = answer_format("", tool_call_parser=name)
    assert found is not None and found.calls is not None
    tag = make(found.calls, list(functions.values()), parallel=parallel)
    params = StructuredOutputsParams.of({"structural_tag": tag})
    made = compiler.compile(SamplingParams(structured_outputs=params, **fields))
    assert made is not None
    return found, made


def allowed(follower) -> list[int]:
    mask = np.zeros(-(-TINY_VOCAB_SIZE // 32), np.uint32)
    follower.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def random_texts(constraint, num_texts: int = 3):
    """Texts of a constraint, drawn at random, without those that do not end by chance."""
    for seed in range(num_texts):
        rng, follower, drawn = np.random.default_rng(seed), constraint.begin(()), bytearray()
        for _ in range(MOST_TOKENS):
            tokens = allowed(follower)
            # letters rather than the odd bytes that a string may also hold, and few spaces
            usual = [one for one in tokens if chr(one).isalnum() or one == TINY_EOS_ID] or tokens
            choices = usual if rng.random() < 0.6 else tokens
            token = TINY_EOS_ID if TINY_EOS_ID in tokens else int(rng.choice(choices))
            if token == TINY_EOS_ID:
                yield drawn.decode()
                break
            follower.push(token)
            drawn.append(token)


def parts_of(found, text: str, functions=FUNCTIONS):
    schemas = {name: one.get("parameters", {}) for name, one in functions.items()}
    parser = AnswerParser(found.template, "", tools=schemas)
    parts = [*parser.feed(text), *parser.finish()]
    assert texts_of(parts) == ("", "")
    return calls_of(parts)


def check_call(part, text: str, functions=FUNCTIONS) -> None:
    assert part.is_whole, text
    schema = functions[part.name].get("parameters", {"type": "object"})
    jsonschema_rs.validate(schema, json.loads(part.arguments))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ENFORCED)
def test_random_texts_of_the_form_are_calls(
    compiler: ConstraintCompiler, name: str, parallel: bool
) -> None:
    found, constraint = constraint_of(compiler, name, parallel=parallel)
    for text in random_texts(constraint):
        parts = parts_of(found, text)
        assert parts and (parallel or len(parts) == 1), text
        for part in parts:
            check_call(part, text)


def test_every_format_of_calls_is_enforced() -> None:
    assert {*FORMATS} - {*ENFORCED} == {"think"}


@pytest.mark.parametrize("name", ENFORCED)
def test_the_form_allows_what_the_model_writes(compiler: ConstraintCompiler, name: str) -> None:
    found, constraint = constraint_of(compiler, name)
    assert TINY_EOS_ID in allowed(constraint.begin(tuple(written(name).encode())))
    assert parts_of(found, written(name)) == [ReadCall("weather", '{"city": "Rom", "days": 3}')]


# strict functions under ``tool_choice`` auto

STRICT = {**FUNCTIONS, "weather": {**FUNCTIONS["weather"], "strict": True}}


@pytest.mark.parametrize("name", ENFORCED)
def test_strict_functions_in_free_text(compiler: ConstraintCompiler, name: str) -> None:
    """An answer may be any text; once a call begins, its arguments follow the schema."""
    found, constraint = constraint_of(compiler, name, make=strict_tag, functions=STRICT)
    assert found.calls is not None
    call = written(name)
    before = "" if found.calls.without_calls else "Let me {see} <this>.\n"
    plain = "<|channel|>final<|message|>It rains.\n" if name == "openai" else "It rains. {[(<\n"
    for text in (plain, call, before + call):
        assert TINY_EOS_ID in allowed(constraint.begin(tuple(text.encode())))
    for wrong in (
        call.replace("3", "true"),
        call.replace("city", "town"),
        call.replace("weather", "x"),
    ):
        assert wrong != call
        with pytest.raises(ValueError, match="satisfy|no token"):
            constraint.begin(tuple((before + wrong).encode()))


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_no_call_follows_text_where_calls_have_no_marks(
    compiler: ConstraintCompiler, name: str
) -> None:
    """A call after text would be read as one, and its arguments are not constrained."""
    found, constraint = constraint_of(compiler, name, make=strict_tag, functions=STRICT)
    call = written(name)
    assert parts_of(found, call) == parts_of(found, "\n" + call)
    constraint.begin(tuple(b"It rains.\nSee {1} and [2].\n"))
    for before in ("It rains.\n", "It rains.\n  " if name == "llama3_json" else "a\n\n"):
        with pytest.raises(ValueError, match="satisfy|no token"):
            constraint.begin(tuple((before + call).encode()))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic", "kimi_k2"])
def test_other_functions_next_to_strict_ones_are_free(
    compiler: ConstraintCompiler, name: str
) -> None:
    strict = {"weather": FUNCTIONS["weather"], "clock": {"name": "clock", "strict": True}}
    _, constraint = constraint_of(compiler, name, make=strict_tag, functions=strict)
    text = written(name).replace("3", '"soon"' if name == "pythonic" else "true")
    assert TINY_EOS_ID in allowed(constraint.begin(tuple(text.encode())))


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_one_strict_call_ends_the_answer(compiler: ConstraintCompiler, name: str) -> None:
    _, constraint = constraint_of(compiler, name, parallel=False, make=strict_tag, functions=STRICT)
    assert allowed(constraint.begin(tuple(written(name).encode()))) == [TINY_EOS_ID]


# arguments that are not one JSON object

NESTED = {
    "save": {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {
                "size": {"type": "number", "minimum": -5},
                "tags": {"type": "array", "items": {"enum": ["a b", 'c"', 3]}, "maxItems": 2},
                "owner": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
                "tree": {"$ref": "#/$defs/tree"},
                "any": {},
                "by": {"type": "object", "additionalProperties": {"type": "boolean"}},
                "flag": {"type": ["boolean", "integer"]},
            },
            "required": ["tags", "tree", "flag"],
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                        "kind": {"const": "t"},
                    },
                    "required": ["kind"],
                }
            },
        },
    }
}


@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "pythonic"])
def test_nested_arguments(compiler: ConstraintCompiler, name: str) -> None:
    found, constraint = constraint_of(compiler, name, parallel=False, functions=NESTED)
    # a number beyond every float is no JSON
    texts = [one for one in random_texts(constraint, 8) if not re.search(r"[eE]\+?\d{3}", one)]
    assert len(texts) > 1
    for text in texts:
        (part,) = parts_of(found, text, NESTED)
        check_call(part, text, NESTED)


# as zod writes references: to where a schema occurs first
TREE = {
    "type": "object",
    "properties": {
        "leaf": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/tree"}]},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}
PLANT = {
    "plant": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "properties": {
                "tree": TREE,
                "other": {"$ref": "#/properties/tree/properties/leaf/anyOf/1"},
                "kinds": {"$ref": "#/properties/tree/properties/kinds"},
            },
            "required": ["tree", "other", "kinds"],
        },
    }
}
PLANTED = {"tree": {"leaf": {"leaf": "x"}}, "other": {"leaf": "y"}, "kinds": ["b"]}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v4", "gemma4", "pythonic"])
def test_references_to_other_arguments(compiler: ConstraintCompiler, name: str) -> None:
    found, constraint = constraint_of(compiler, name, functions=PLANT)
    assert found.calls is not None
    text = written_calls(found.calls, [("plant", PLANTED)], 0)
    assert TINY_EOS_ID in allowed(constraint.begin(tuple(text.encode())))
    (part,) = parts_of(found, text, PLANT)
    assert json.loads(part.arguments) == PLANTED
    at = text.rindex("b")  # of the kinds
    with pytest.raises(ValueError, match="satisfy|no token"):
        constraint.begin(tuple(f"{text[:at]}c{text[at + 1 :]}".encode()))


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("pythonic", {"name": "get-time"}, "no name in Python"),
        ("pythonic", {"name": "f", "parameters": {"required": ["from"]}}, "named 'from'"),
        ("gemma4", {"name": "f", "parameters": {"required": ["a b"]}}, "named 'a b'"),
        (
            "gemma4",
            {
                "name": "f",
                "strict": True,
                "parameters": {"properties": {"a": {"uniqueItems": True}}},
            },
            "keyword uniqueItems",
        ),
        ("gemma4", {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/b"}}}}, "target"),
        ("gemma4", {"name": "f", "parameters": {"properties": {"a": {"type": "b"}}}}, "unknown"),
        *(
            (
                name,
                {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {"a": {"$ref": "#"}},
                        "required": ["a"],
                    },
                },
                "never ends",
            )
            for name in ("hermes", "gemma4")
        ),
    ],
)
def test_functions_that_cannot_be_enforced(
    compiler: ConstraintCompiler, name: str, function, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        constraint_of(compiler, name, functions={"f": function})


THINKING = Thinking(begin=(1, 2), end=(3, 4), budget=2)
WITH_CALLS = Thinking(end=(3,), is_open=True, budget=2, call_begin=(5, 6), call_end=(8,))


@pytest.mark.parametrize(
    ("thinking", "tokens", "state"),
    [
        (THINKING, (), (1, None, False)),
        (THINKING, (1,), (2, None, False)),
        (THINKING, (9,), (None, None, True)),  # an answer without thoughts
        (THINKING, (1, 9), (None, None, True)),
        (THINKING, (1, 2), (None, None, False)),
        (THINKING, (1, 2, 7, 7), (None, 3, False)),
        (THINKING, (1, 2, 7, 3), (None, 4, False)),  # the end has begun by itself
        (THINKING, (1, 2, 7, 7, 3, 4), (None, None, True)),
        (THINKING, (1, 2, 3, 4), (None, None, True)),
        (THINKING, (1, 2, 3, 3), (None, 4, False)),
        (Thinking(end=(3,), is_open=True, budget=0), (), (None, 3, False)),
        (Thinking(end=(3,), is_open=True), (1,) * 99, (None, None, False)),
        (Thinking(end=(3,)), (), (None, None, True)),
        # a call that has begun is not interrupted
        (WITH_CALLS, (5, 5, 6, 7, 7), (None, None, False)),
        (WITH_CALLS, (5, 6, 7, 7, 8), (None, 3, False)),
        (WITH_CALLS, (5, 6, 7, 3), (None, None, True)),
        (WITH_CALLS, (5, 7, 6), (None, 3, False)),
    ],
)
def test_thoughts(thinking: Thinking, tokens, state) -> None:
    tracker = ThoughtTracker(thinking, lambda token: bytes([ord("a") + token]))
    for token in tokens:
        tracker.push(token)
    assert (tracker.opening, tracker.forced, tracker.is_over) == state


def test_the_form_begins_after_the_thoughts(compiler: ConstraintCompiler) -> None:
    thinking = Thinking(begin=tuple(b"<think>"), end=tuple(b"</think>"), budget=3)
    _, constraint = constraint_of(compiler, "llama3_json", parallel=False, thinking=thinking)
    assert allowed(constraint.begin(())) == [ord("<"), ord("{")]
    assert allowed(constraint.begin(tuple(b"<t"))) == [ord("h")]
    assert allowed(constraint.begin(tuple(b'{"na'))) == [ord("m")]
    within = allowed(constraint.begin(tuple(b"<think>ab")))
    assert len(within) == TINY_VOCAB_SIZE - 1 and TINY_EOS_ID not in within
    assert allowed(constraint.begin(tuple(b"<think>abc"))) == [ord("<")]
    assert allowed(constraint.begin(tuple(b"<think>abc</think>"))) == [ord("{")]
    with pytest.raises(ValueError, match="."):
        constraint.begin(tuple(b"<tool"))


def test_descriptions_are_no_part_of_a_grammar() -> None:
    words = {"description": "x" * 100, "title": "y" * 100}
    place = {"type": "object", "properties": {"title": {"type": "string", **words}}, **words}
    kind = {"enum": [{"title": "kept"}], **words}
    schema = {"type": "object", "properties": {"place": place, "description": kind}, **words}
    for name in ENFORCED:
        found = answer_format("", tool_call_parser=name)
        assert found is not None and found.calls is not None
        function = {"name": "f", "parameters": schema}
        text = str(calls_tag(found.calls, [function], parallel=False))
        assert "xxx" not in text and "yyy" not in text
        assert "kept" in text and "'title'" in text and "description" in text
