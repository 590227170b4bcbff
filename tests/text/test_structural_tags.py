"""Structural tags whose parts follow free text: they end, and what they exclude is in no answer."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.errors import RequestError

pytest.importorskip("llguidance")
from kit.grammar_walks import Form

ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], *tags: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **fields}


F, G = tag("<f>", NUMBER, "</f>"), tag("<g>", NUMBER, "</g>")
EXCLUDES = {"excludes": ["two"]}
# the format, texts that have it, and texts that do not
FORMATS: dict[str, tuple[Any, list[str], list[str]]] = {
    "text, constant": (sequence(ANY, const(" five")), [" five", "a five b five"], ["five", ""]),
    "regex, constant": (sequence(regex(".*"), const("z")), ["z", "az"], ["a"]),
    "text, regex": (sequence(ANY, regex("[0-9]+")), ["a1", "a12"], ["a"]),
    "text, choice": (sequence(ANY, either(const("x"), const("y"))), ["ax", "ay"], ["a"]),
    "choice, constant": (sequence(either(ANY, const("a")), const("z")), ["z", "qz"], ["a"]),
    "texts, constants": (sequence(ANY, const("m"), ANY, const("z")), ["mz", "amaz"], ["az"]),
    "inner sequence": (sequence(sequence(const("s"), ANY), const("z")), ["sz", "saz"], ["s"]),
    "limited text": (sequence({**ANY, **EXCLUDES}, const("z")), ["az"], ["two z", "twoz"]),
    "text, constant, JSON": (sequence(ANY, const(": "), NUMBER), ["a: 1"], ["a: x"]),
    "text, tag": (sequence(ANY, F), ["<f>1</f>", "a<f>1</f>"], ["a", "a<f>1</f>b"]),
    "text, tags": (sequence(ANY, either(F, G)), ["a<f>1</f>", "<g>1</g>"], ["a"]),
    "tags, constant": (sequence(triggered(["<f"], F), const("z")), ["z", "a<f>1</f>bz"], ["a"]),
    "tag of a sequence": (tag("(", sequence(const("q"), ANY), ")"), ["(q)", "(qa)"], ["(q"]),
    "tag of a choice": (tag("(", either(ANY, NUMBER), ")"), ["(a)", "(5)"], ["(5"]),
    "tag of a regex": (tag("(", regex(".*"), ")"), ["()", "(a)"], ["(a)b"]),
    "tag of limited text": (tag("(", {**ANY, **EXCLUDES}, ")"), ["(a)"], ["(two)"]),
    "tag of tags": (tag("(", triggered(["<f"], F), ")"), ["()", "(a<f>1</f>b)"], ["(a"]),
    "tag without an end": (sequence(tag("(", ANY, ""), const(")")), ["()", "(a)"], ["("]),
    "excluded": (triggered(["<f"], F, **EXCLUDES), ["a<f>1</f>b"], ["two", "<f>1</f> two"]),
    "excluded before a tag": (triggered(["<f"], F, **EXCLUDES), ["tw<f>1</f>"], ["two<f>1</f>"]),
    "excluded, at least one": (
        triggered(["<f", "<g"], F, G, **EXCLUDES, at_least_one=True),
        ["a<g>1</g>b<f>1</f>"],
        ["a", "two<f>1</f>"],
    ),
    "excluded, one": (
        triggered(["<f"], F, **EXCLUDES, stop_after_first=True),
        ["a", "a<f>1</f>"],
        ["two", "a<f>1</f>b"],
    ),
    "one trigger begins like another": (
        triggered(["<fo", "<f"], tag("<fo>", NUMBER, ";"), tag("<fx>", NUMBER, ";")),
        ["a<fo>1;b", "a<fx>1;"],
        ["a<fox"],
    ),
    "no end": (triggered(["<f"], tag("<f>", NUMBER, "")), ["a<f>1", "a<f>1b<f>2"], ["a<f>b"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_end(name: str) -> None:
    format_, texts, wrong = FORMATS[name]
    form = Form(structural_tag={"format": format_})
    assert [text for text in texts if not form.accepts(text)] == []
    assert [text for text in wrong if form.accepts(text)] == []
    assert "dead" not in {form.walk(seed, longest=60).end for seed in range(6)}


@pytest.mark.parametrize(
    ("format_", "words"),
    [
        (sequence(ANY, NUMBER), "any_text is possible at the end"),
        (sequence(regex("a.*"), NUMBER), "regex is possible at the end"),
        (sequence(triggered(["<f"], F), NUMBER), "triggered_tags is possible at the end"),
        (sequence(tag("(", ANY, ""), NUMBER), "tag is possible at the end"),
        (triggered(["a<f", "<f"], F), "the trigger '<f' within 'a<f'"),
        (triggered(["<f"], F, excludes=[""]), "excludes, a list of texts"),
        ({**ANY, "excludes": "two"}, "excludes, a list of texts"),
    ],
)
def test_formats_without_an_end_are_refused(format_: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Form(structural_tag={"format": format_})
