"""``RuleWriter``: collects the rules of a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jaxinfer.text.grammar.patterns import literal


@cache
def splitter(texts: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of special tokens within a text, the longest one where several begin."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class RuleWriter:
    """The rules that are added, for a vocabulary with special tokens."""

    def __init__(self, special: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._special = special  # their ids by their text
        self._split = splitter(tuple(special))
        self._options = options  # llguidance's, of JSON schemas

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, expression: str) -> str:
        """Add a terminal and return its name."""
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def recursive_rule(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body, made from its name, may contain it."""
        number, name = len(self.rules), f"part_{len(self.rules)}"
        self.rules.append("")
        self.rules[number] = f"{name}: {body(name)}"
        return name

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """A JSON value of a schema; ``lenient``: without keywords that are not supported."""
        options = {**self._options, "lenient": True} if lenient else self._options
        return f"%json {json.dumps({**schema, 'x-guidance': dict(options)})}"

    def is_special(self, text: str) -> bool:
        """True if a text is a special token."""
        return text in self._special

    def has_special(self, text: str) -> bool:
        """True if a special token is in a text."""
        return self._split.search(text) is not None

    def begins_special(self, text: str) -> bool:
        """True if a text begins with a special token."""
        return self._split.match(text) is not None

    def parts_of(self, text: str) -> list[str]:
        """A text in parts that are special tokens, or without them."""
        parts: list[str] = []
        position = 0
        for found in self._split.finditer(text):
            parts += [text[position : found.start()], found[0]]
            position = found.end()
        return [part for part in (*parts, text[position:]) if part]

    def literal(self, text: str) -> str:
        """A text in which special tokens stand for themselves."""
        parts = self.parts_of(text)
        special = self._special
        return " ".join(f"<[{special[one]}]>" if one in special else literal(one) for one in parts)
