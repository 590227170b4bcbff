"""Structural tags as a Lark grammar: free text in which some parts have a form.

Both of vLLM's shapes are read: ``{"structures": [...], "triggers": [...]}``, and the newer
``{"format": {...}}``, whose types are those of xgrammar's structural tags; ``arguments``, of calls
that are not one JSON object, is jaxinfer's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD
from jaxinfer.text.grammar.arguments import ArgumentsWriter, Form
from jaxinfer.text.grammar.schema import check_schema

_NAME = f"{FIELD}.structural_tag"
_ANY_TEXT = r"/(.|\n)*/"


def tags_as_lark(
    tag: Any,
    special: Mapping[str, int],  # ids of special tokens by their text
    regex_to_lark: Callable[[str], str],
    options: Mapping[str, Any],  # llguidance's options of JSON schemas
) -> str:
    """The Lark grammar; raises ``RequestError`` for a tag of an unknown or incomplete form."""
    if not isinstance(tag, Mapping):
        raise RequestError(f"{_NAME} must be an object")
    writer = _LarkWriter(special, regex_to_lark, options)
    if "structures" in tag:
        tags = [
            {
                "begin": one.get("begin"),
                "content": {"type": "json_schema", "json_schema": one.get("schema")},
                "end": one.get("end"),
            }
            for one in _objects(tag, "structures")
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}
    start = writer.expression(tag.get("format"))
    return "\n".join(("%llguidance {}", f"start: {start}", *writer.rules, ""))


@cache
def splitter(texts: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of special tokens within a text, the longest one where several begin."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class _LarkWriter:
    """Collects the rules of a grammar while it writes the expression of a format."""

    def __init__(
        self,
        special: Mapping[str, int],
        regex_to_lark: Callable[[str], str],
        options: Mapping[str, Any],
    ) -> None:
        self.rules: list[str] = []
        self._special = special
        self._split = splitter(tuple(special))
        self._regex_to_lark = regex_to_lark
        self._options = options

    def expression(self, form: Any) -> str:
        """The Lark expression of a format; rules that it needs are added to ``rules``."""
        if not isinstance(form, Mapping):
            raise RequestError(f"{_NAME} needs a format, which is an object with a type")
        match form.get("type"):
            case "const_string":
                return self.literal(_text(form, "value"))
            case "json_schema":
                schema = form.get("json_schema")
                if not isinstance(schema, Mapping):
                    raise RequestError(f"{_NAME} has a json_schema that is not an object")
                check_schema(schema, "structural_tag")
                return self.json(schema)
            case "regex":
                return f"/{self._regex_to_lark(_text(form, 'pattern'))}/"
            case "any_text":
                return self._text_without(form.get("excludes") or ())
            case "arguments":
                return self._arguments(form)
            case "sequence":
                return self.rule(" ".join(self._all(form, "elements")))
            case "or":
                return self.rule(" | ".join(self._all(form, "elements")))
            case "tag":
                return self._tag(form)
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case kind:
                raise RequestError(
                    f"{_NAME} has the type {str(kind)[:40]!r}; const_string, json_schema, regex, "
                    "any_text, sequence, or, tag, triggered_tags and tags_with_separator are known"
                )

    def _all(self, form: Mapping[str, Any], name: str) -> list[str]:
        return [self.expression(one) for one in _objects(form, name)]

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def recursive_rule(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body, made from its name, may contain it."""
        number, name = len(self.rules), f"part_{len(self.rules)}"
        self.rules.append("")
        self.rules[number] = f"{name}: {body(name)}"
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value of a schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': dict(self._options)})}"

    def text_until(self, end: str, times: str = "*") -> str:
        """A text, and the first ``end`` after it; ``times`` is the number of its characters, in the
        notation of regular expressions.
        """
        text = rf"/(.|\n){times}/"
        if self._split.match(end):  # a special token is in no text
            return f"{text} {self.literal(end)}"
        ending = json.dumps(end, ensure_ascii=False)
        body = f"{text} {ending}"
        if times != "*":  # nor is it among the characters that must be there
            body = rf"({body}) & ~({_ANY_TEXT} {ending} /(.|\n)+/)"
        return self.rule(body, "[lazy]")

    def _pattern_until(self, pattern: str, end: str) -> str:
        """A text of this form, and the ``end`` after it, which may begin as the text ends."""
        text = f"/{self._regex_to_lark(pattern)}/"
        if self._split.search(end):
            return f"{text} {self.literal(end)}"
        name = f"TEXT_{len(self.rules)}"  # a terminal is one expression, in which nothing is greedy
        self.rules.append(f"{name}: {text} {json.dumps(end, ensure_ascii=False)}")
        return name

    def _text_without(self, texts: Sequence[str]) -> str:
        """Any text, to its end, that contains none of these."""
        others = [one for one in texts if one not in self._special]
        if not others:
            return _ANY_TEXT
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {_ANY_TEXT} & ~{_containing(others)}")
        return name

    def _arguments(self, form: Mapping[str, Any]) -> str:
        """The arguments of a call; see ``arguments``."""
        quotes = form.get("quotes")
        how = Form(form["key_end"], form["separator"], tuple(quotes) if quotes else None)
        schema = form["json_schema"]
        check_schema(schema, "structural_tag")
        try:
            return ArgumentsWriter(self, how, schema).arguments()
        except ValueError as error:
            raise RequestError(f"{_NAME} cannot be used: {error}") from None

    def _tag(self, form: Mapping[str, Any], begin: str | None = None) -> str:
        """A tag; ``begin`` is the rest of its beginning after a trigger."""
        begin = _text(form, "begin") if begin is None else begin
        content, end = form.get("content"), _text(form, "end", empty=True)
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            inner = self.text_until(end)
        elif isinstance(content, Mapping) and content.get("type") == "regex" and end:
            inner = self._pattern_until(_text(content, "pattern"), end)
        else:
            inner = f"{self.expression(content)} {self.literal(end)}"
        return self.rule(f"{self.literal(begin)} {inner}")

    def _triggered(self, form: Mapping[str, Any]) -> str:
        """Free text in which a trigger begins one of the tags."""
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise RequestError(f"{_NAME} needs triggers, a list of texts")
        triggers = [one for one in triggers if isinstance(one, str) and one]
        free = self._text_without(triggers)
        tags: dict[str, list[str]] = {}
        for tag in _objects(form, "tags"):
            begin = _text(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise RequestError(f"{_NAME} has the tag {begin[:80]!r}, which no trigger begins")
            tags.setdefault(trigger, []).append(self._tag(tag, begin.removeprefix(trigger)))
        choices: list[str] = []
        for trigger, several in tags.items():
            if trigger in self._special:
                head = f"{free} {self.literal(trigger)}"
            else:  # the text up to the first trigger
                others = [one for one in triggers if one not in (trigger, *self._special)]
                text = f"({_ANY_TEXT} {json.dumps(trigger, ensure_ascii=False)})"
                head = self.rule(f"{text} & ~{_containing(others)}" if others else text, "[lazy]")
            choices.append(self.rule(f"{head} ({' | '.join(several)})"))
        tagged = self.rule(" | ".join(choices))
        at_least_one, only_one = form.get("at_least_one"), form.get("stop_after_first")
        if only_one:
            return self.rule(tagged if at_least_one else f"{tagged} | {free}")
        return self.rule(f"({tagged}){'+' if at_least_one else '*'} {free}")

    def _separated(self, form: Mapping[str, Any]) -> str:
        """Tags with a separator between them."""
        tags = self.rule(" | ".join(self._tag(tag) for tag in _objects(form, "tags")))
        if form.get("stop_after_first"):
            several = tags
        else:
            several = f"{tags} ({self.literal(_text(form, 'separator', empty=True))} {tags})*"
        return self.rule(several if form.get("at_least_one") else f"({several})?")

    def literal(self, text: str) -> str:
        """A text in which special tokens stand for themselves."""
        parts: list[str] = []
        position = 0
        for found in self._split.finditer(text):
            if found.start() > position:
                parts.append(json.dumps(text[position : found.start()], ensure_ascii=False))
            parts.append(f"<[{self._special[found[0]]}]>")
            position = found.end()
        if position < len(text):
            parts.append(json.dumps(text[position:], ensure_ascii=False))
        return " ".join(parts)


def _containing(texts: Sequence[str]) -> str:
    """A text with one of these in it, as a part of a terminal."""
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return f"({_ANY_TEXT} ({choices}) {_ANY_TEXT})"


def _text(form: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """A field that is text."""
    value = form.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise RequestError(f"{_NAME} needs {name}, a text, in each {form.get('type', 'structure')}")
    return value


def _objects(form: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A field that is a list of objects, not empty."""
    value = form.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, Mapping) for v in value):
        raise RequestError(f"{_NAME} needs {name}, a list of objects that is not empty")
    return value
