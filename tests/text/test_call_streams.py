"""Calls of random tools in every format: they are read as written, however the text is cut."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest

from jaxinfer.text.answers.call_parts import CallArguments, CallBegin, CallEnd
from jaxinfer.text.answers.formats import FORMATS, AnswerFormat, answer_format
from jaxinfer.text.answers.parser import AnswerParser, Content, Part, Reasoning
from kit.answer_parts import calls_of, texts_of
from kit.random_calls import Drawn, drawn, written

NAMES = [name for name in FORMATS if name != "think"]  # which have no calls
# the text before a call ends with a line, where a call has no mark
BEFORE = {"openai": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"}


def format_of(name: str) -> AnswerFormat:
    found = answer_format("", tool_call_parser=name)
    assert found is not None
    return found


def trace(parts: Iterable[Part]) -> str:
    """The parts as one text, in which pieces of one part are joined."""
    written, last = [], None
    for part in parts:
        match part:
            case CallBegin(name):
                written.append(f"\0begin {name}\0")
            case CallEnd(is_whole):
                written.append(f"\0end {is_whole}\0")
            case CallArguments(text):
                written.append(text)
            case Content(text) | Reasoning(text):
                written.append(("" if type(part) is last else f"\0{type(part).__name__}\0") + text)
        last = type(part)
    return "".join(written)


def fed(parser: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    return [part for piece in pieces for part in parser.feed(piece)]


def pieces_of(text: str, draw: random.Random) -> list[str]:
    ends = sorted(draw.choices(range(len(text) + 1), k=len(text) // 3))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def check(name: str, seed: int, *, everywhere: bool = False) -> None:
    """Check the calls of one seed, whole, in pieces, and cut off after some characters."""
    found, one, draw = format_of(name), drawn(seed), random.Random(seed)
    text = BEFORE.get(name, "I look.\n\n" * (seed % 2)) + written(found, one)

    def parser() -> AnswerParser:
        return AnswerParser(found.template, "", tools=one.tools)

    at_once = parser()
    whole = [*at_once.feed(text), *at_once.finish()]
    calls = calls_of(whole)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == list(one.calls), text
    assert all(call.is_whole for call in calls)
    assert texts_of(whole)[0].strip() == ("I look." if "I look." in text else ""), text
    streamed = parser()
    assert trace([*fed(streamed, pieces_of(text, draw)), *streamed.finish()]) == trace(whole), text
    for cut in range(len(text)) if everywhere else draw.sample(range(len(text)), 2):
        one_by_one, at_once = parser(), parser()
        parts = fed(one_by_one, (text[at : min(at + 2, cut)] for at in range(0, cut, 2)))
        assert trace(whole).startswith(trace(parts)), text[:cut]
        assert trace(at_once.feed(text[:cut])) == trace(parts), text[:cut]
        parts += one_by_one.finish(is_cut=True)
        calls_of(parts)


@pytest.mark.parametrize("name", NAMES)
def test_random_calls(name: str) -> None:
    for seed in range(200):
        check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_many_random_calls(name: str) -> None:
    for seed in range(200, 2200):
        check(name, seed, everywhere=seed % 20 == 0)


LINE = 'def f(a):\n    return [a, {"x": 1}]  # <b> and more, ok\n'


def seconds(name: str, value: Any) -> float:
    """The CPU time of a call with this argument, 4 characters a piece."""
    schema = {"type": "string" if isinstance(value, str) else "object"}
    tools = {"save": {"properties": {"data": schema}}}
    text = written(format_of(name), Drawn(tools, (("save", {"data": value}),)))
    parser, start = AnswerParser(format_of(name).template, "", tools=tools), time.process_time()
    parts = [*fed(parser, (text[at : at + 4] for at in range(0, len(text), 4))), *parser.finish()]
    passed = time.process_time() - start
    (call,) = calls_of(parts)
    assert json.loads(call.arguments) == {"data": value}
    if name != "pythonic" and isinstance(value, str):
        assert len(parts) > len(value) / 8  # as they are generated
    return passed


@pytest.mark.parametrize("name", NAMES)
def test_the_time_of_a_call_is_linear_in_its_length(name: str) -> None:
    def value(size: int, *, is_text: bool) -> Any:
        if is_text:
            return (LINE * (size // len(LINE) + 1))[:size]
        return {f"k{number}": [number, "a b", {"c": None}] for number in range(size // 32)}

    calls = format_of(name).calls
    assert calls is not None
    for is_text in (True, False) if calls.style != "json" else (True,):
        short, long = (
            # the lesser: of a suite's objects, collecting garbage takes as long as a short call
            min(seconds(name, value(size, is_text=is_text)) for _ in range(2))
            for size in (20_000, 80_000)
        )
        assert long < 8 * short  # 4; quadratic: 16


@pytest.mark.parametrize("name", ["hermes", "glm45"])
@pytest.mark.parametrize("line", ["Some words, and more.\n", "<tool_call> ", "<tool_call>{\n"])
def test_the_time_of_a_long_text_is_linear_in_its_length(name: str, line: str) -> None:
    """Answers that are not streamed are parsed at once."""

    def passed(size: int) -> float:
        parser = AnswerParser(format_of(name).template, "<think>", tools={"save": {}})
        start = time.process_time()
        parts = [*parser.feed(line * (size // len(line))), *parser.finish()]
        assert not calls_of(parts)
        return time.process_time() - start

    short, long = passed(80_000), passed(320_000)
    assert long < 8 * short + 0.05  # 4; with one search of the whole text 16
