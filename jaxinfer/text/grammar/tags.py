"""Structural tags as a Lark grammar: free text in which some parts have a form.

Both of vLLM's shapes are read: ``{"structures": [...], "triggers": [...]}``, and the newer
``{"format": {...}}``, whose types are those of xgrammar's structural tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD

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
        texts = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._regex_to_lark = regex_to_lark
        self._options = options

    def expression(self, form: Any) -> str:
        """The Lark expression of a format; rules that it needs are added to ``rules``."""
        if not isinstance(form, Mapping):
            raise RequestError(f"{_NAME} needs a format, which is an object with a type")
        match form.get("type"):
            case "const_string":
                return self._literal(_text(form, "value"))
            case "json_schema":
                schema = form.get("json_schema")
                if isinstance(schema, bool) or not isinstance(schema, Mapping):
                    raise RequestError(f"{_NAME} has a json_schema that is not an object")
                return f"%json {json.dumps({**schema, 'x-guidance': dict(self._options)})}"
            case "regex":
                return f"/{self._regex_to_lark(_text(form, 'pattern'))}/"
            case "any_text":
                return _ANY_TEXT
            case "sequence":
                return self._rule(" ".join(self._all(form, "elements")))
            case "or":
                return self._rule(" | ".join(self._all(form, "elements")))
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

    def _rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _tag(self, form: Mapping[str, Any], begin: str | None = None) -> str:
        """A tag; ``begin`` is the rest of its beginning after a trigger."""
        begin = _text(form, "begin") if begin is None else begin
        content, end = form.get("content"), _text(form, "end", empty=True)
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            if end in self._special:
                inner = f"{_ANY_TEXT} {self._literal(end)}"
            else:  # the text ends where the end first occurs
                inner = self._rule(_ANY_TEXT, f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        else:
            inner = f"{self.expression(content)} {self._literal(end)}"
        return self._rule(f"{self._literal(begin)} {inner}")

    def _triggered(self, form: Mapping[str, Any]) -> str:
        """Free text in which a trigger begins one of the tags."""
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise RequestError(f"{_NAME} needs triggers, a list of texts")
        choices: list[str] = []
        for tag in _objects(form, "tags"):
            begin = _text(tag, "begin")
            fitting = [one for one in triggers if isinstance(one, str) and one]
            trigger = next((one for one in fitting if begin.startswith(one)), None)
            if trigger is None:
                raise RequestError(f"{_NAME} has the tag {begin[:80]!r}, which no trigger begins")
            rest = self._tag(tag, begin.removeprefix(trigger))
            if trigger in self._special:
                choices.append(self._rule(f"{_ANY_TEXT} {self._literal(trigger)} {rest}"))
            else:
                text = json.dumps(trigger, ensure_ascii=False)
                head = self._rule(f"{_ANY_TEXT} {text}", "[lazy]")
                choices.append(self._rule(f"{head} {rest}"))
        tags = self._rule(" | ".join(choices))
        at_least_one, only_one = form.get("at_least_one"), form.get("stop_after_first")
        if only_one:
            return self._rule(tags if at_least_one else f"{tags} | {_ANY_TEXT}")
        return self._rule(f"({tags}){'+' if at_least_one else '*'} {_ANY_TEXT}")

    def _separated(self, form: Mapping[str, Any]) -> str:
        """Tags with a separator between them."""
        tags = self._rule(" | ".join(self._tag(tag) for tag in _objects(form, "tags")))
        if form.get("stop_after_first"):
            several = tags
        else:
            several = f"{tags} ({self._literal(_text(form, 'separator', empty=True))} {tags})*"
        return self._rule(several if form.get("at_least_one") else f"({several})?")

    def _literal(self, text: str) -> str:
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
