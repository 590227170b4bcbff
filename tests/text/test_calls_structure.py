"""The forms that enforce calls: every text that they allow is read as calls of the tools."""

from __future__ import annotations

import json

import jsonschema_rs
import numpy as np
import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams, Thinking
from jaxinfer.text.answers.formats import FORMATS, answer_format
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.answers.structure import calls_tag
from jaxinfer.text.answers.values import Call
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.grammar.thinking import ThoughtTracker
from jaxinfer.text.tokenizer import load_tokenizer
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
PROPERTIES = {
    name: one.get("parameters", {}).get("properties", {}) for name, one in FUNCTIONS.items()
}
ENFORCED = [
    name for name in FORMATS if (found := answer_format("", tool_call_parser=name)) and found.calls
]
MOST_TOKENS = 700


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(
        load_tokenizer(tiny_tokenizer_spec()), TINY_VOCAB_SIZE, (TINY_EOS_ID,)
    )


def constraint_of(compiler: ConstraintCompiler, name: str, *, parallel: bool, **fields):
    found = answer_format("", tool_call_parser=name)
    assert found is not None and found.calls is not None
    tag = calls_tag(found.calls, list(FUNCTIONS.values()), parallel=parallel)
    params = StructuredOutputsParams.of({"structural_tag": tag})
    made = compiler.compile(SamplingParams(structured_outputs=params, **fields))
    assert made is not None
    return found, made


def allowed(follower) -> list[int]:
    mask = np.zeros(-(-TINY_VOCAB_SIZE // 32), np.uint32)
    follower.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ENFORCED)
def test_random_texts_of_the_form_are_calls(
    compiler: ConstraintCompiler, name: str, parallel: bool
) -> None:
    found, constraint = constraint_of(compiler, name, parallel=parallel)
    for seed in range(3):
        rng, follower, drawn = np.random.default_rng(seed), constraint.begin(()), bytearray()
        for _ in range(MOST_TOKENS):
            tokens = allowed(follower)
            # letters rather than the odd bytes that a string may also hold, and few spaces
            usual = [one for one in tokens if chr(one).isalnum() or one == TINY_EOS_ID] or tokens
            choices = usual if rng.random() < 0.6 else tokens
            token = TINY_EOS_ID if TINY_EOS_ID in tokens else int(rng.choice(choices))
            if token == TINY_EOS_ID:
                break
            follower.push(token)
            drawn.append(token)
        else:
            continue  # the string of an argument did not end by chance
        parts = AnswerParser(found.template, "", tools=PROPERTIES).feed(drawn.decode())
        parser = AnswerParser(found.template, "", tools=PROPERTIES)
        parts = [*parser.feed(drawn.decode()), *parser.finish()]
        assert parts and (parallel or len(parts) == 1), drawn
        for part in parts:
            assert isinstance(part, Call), (drawn, parts)
            schema = FUNCTIONS[part.name].get("parameters", {"type": "object"})
            jsonschema_rs.validate(schema, json.loads(part.arguments))


@pytest.mark.parametrize("name", [name for name in ENFORCED if name in WRITERS])
def test_the_form_allows_what_the_model_writes(compiler: ConstraintCompiler, name: str) -> None:
    _, constraint = constraint_of(compiler, name, parallel=True)
    message = Message(calls=(("weather", {"city": "Rom", "days": 3}),))
    text = WRITERS[name](message)
    if name == "mistral":  # the newer form; with one call the older one has these marks
        text = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]'
    if name == "openai":
        text += "<|call|>"
    follower = constraint.begin(tuple(text.encode()))
    assert TINY_EOS_ID in allowed(follower)


THINKING = Thinking(begin=(1, 2), end=(3, 4), budget=2)


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
    ],
)
def test_thoughts(thinking: Thinking, tokens, state) -> None:
    tracker = ThoughtTracker(thinking)
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
