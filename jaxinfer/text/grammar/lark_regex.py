"""A Lark grammar without recursion as one regular expression, which forms of any kind can contain.

The notation is that of https://lark-parser.readthedocs.io/en/stable/grammar.html. The expression
describes the grammar's language: no terminal is preferred to another, as Lark's lexer would.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from jaxinfer.core.structured import MAX_REGEX_BYTES

ANCHORS = 16  # bytes that a pattern needs around the expression
MAX_DEPTH = 64  # of rules and brackets within each other
_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\r]+|(?://|\#)[^\n]*)|(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>_?[A-Za-z][A-Za-z0-9_]*)|(?P<number>-?[0-9]+)|(?P<directive>%[a-z]+)
    |(?P<sign>->|\.\.|[:|()\[\]?*+~.,!{}])""",
    re.VERBOSE,
)
_COMMON: Mapping[str, str] = MappingProxyType(  # the terminals of Lark's library "common"
    {
        "LF": r"\n",
        "CR": r"\r",
        "NEWLINE": r"(?:\r?\n)+",
        "WS": r"[ \t\f\r\n]+",
        "WS_INLINE": r"[ \t]+",
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[0-9A-Fa-f]",
        "INT": "[0-9]+",
        "SIGNED_INT": r"[+\-]?[0-9]+",
        "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
        "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
        "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
        "SIGNED_NUMBER": r"(?:[+\-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
        "LCASE_LETTER": "[a-z]",
        "UCASE_LETTER": "[A-Z]",
        "LETTER": "[A-Za-z]",
        "WORD": "[A-Za-z]+",
        "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
        "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    }
)


class NotRegular(ValueError):
    """The grammar may be right, but no regular expression of a usable size is made of it."""


def lark_as_regex(definition: str) -> str:
    """The expression of all texts of the rule ``start``; raises ``NotRegular``, or ``ValueError``
    for a grammar that is wrong. Both say why.
    """
    rules, ignored = _Reader(_tokens(definition)).grammar()
    if "start" not in rules:
        raise ValueError("it has no rule start")
    writer = _Writer(rules)
    if ignored:
        writer.ignored = f"(?:{'|'.join(writer.alternatives(ignored, False, 0))})*"
    written = writer.ignored + writer.named("start", 0)
    if len(written.encode()) > MAX_REGEX_BYTES - ANCHORS:
        raise NotRegular("it is too large as a regular expression")
    return written


class _Token(NamedTuple):
    kind: str
    text: str


type _Atom = _Token | tuple[_Token, _Token] | list[list[_Item]]  # a text, a range or a group


@dataclass(frozen=True)
class _Item:
    atom: _Atom
    times: str = ""  # in the notation of regular expressions


type _Choices = list[list[_Item]]


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    position, depth = 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise ValueError(f"line {line} is not in the notation of Lark")
        position, kind = match.end(), str(match.lastgroup)
        depth += (match[0] in "([") - (match[0] in ")]") if kind == "sign" else 0
        if kind == "space" or (kind == "line" and depth > 0):
            continue
        if match[0] == "|" and depth == 0:  # a rule goes on in the next line
            while found and found[-1].kind == "line":
                found.pop()
        found.append(_Token(kind, match[0]))
    return [*found, _Token("line", "\n")]


class _Reader:
    """Reads tokens as rules."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0

    def grammar(self) -> tuple[dict[str, _Choices | str], _Choices]:
        """The rules, of imported terminals their expressions, and what is ignored between texts."""
        rules: dict[str, _Choices | str] = {}
        ignored: _Choices = []
        while self._next < len(self._tokens):
            token = self._take()
            if token.kind == "line":
                continue
            if token.text == "%import":
                rules |= self._imports()
            elif token.text == "%ignore":
                ignored += self._choices(0)
            elif token.kind == "directive":
                raise NotRegular(f"it has {token.text}")
            else:
                while token.text in "?!":
                    token = self._take()
                if token.kind != "name":
                    raise ValueError(f"a rule begins with {token.text!r}")
                if self._takes("{"):
                    raise NotRegular(f"its rule {token.text!r} has parameters")
                if self._takes("."):
                    self._take()  # its priority
                if not self._takes(":"):
                    raise ValueError(f"a colon is missing after {token.text!r}")
                rules[token.text] = self._choices(0)
        return rules, ignored

    def _imports(self) -> dict[str, str]:
        if self._take().text != "common" or self._peek().text not in (".", "("):
            raise NotRegular("it imports from other libraries than common")
        names: list[tuple[str, str]] = []
        if self._takes("."):
            name = self._take().text
            names.append((self._take().text if self._takes("->") else name, name))
        else:
            self._take()
            while (token := self._take()).text != ")":
                if token.text != ",":
                    names.append((token.text, token.text))
        if unknown := [name for _, name in names if name not in _COMMON]:
            raise ValueError(f"it imports {unknown[0]!r:.60}, which common does not have")
        return {alias: _COMMON[name] for alias, name in names}

    def _choices(self, depth: int) -> _Choices:
        if depth > MAX_DEPTH:
            raise NotRegular("its brackets are nested too deeply")
        choices: _Choices = [[]]
        while True:
            token = self._peek()
            if token.kind == "line" or token.text in (")", "]"):
                return choices
            if self._takes("|"):
                choices.append([])
            elif self._takes("->"):
                self._take()  # the alias names a node of the tree
            else:
                choices[-1].append(self._item(depth))

    def _item(self, depth: int) -> _Item:
        token = self._take()
        atom: _Atom = token
        times = ""
        if token.text in ("(", "["):
            atom = self._choices(depth + 1)
            if not self._takes(")" if token.text == "(" else "]"):
                raise ValueError("a bracket is not closed")
            if token.text == "[":
                atom = [[_Item(atom, "?")]]
        elif token.kind == "string" and self._takes(".."):
            atom = (token, self._take())
        elif token.kind not in ("string", "regex", "name"):
            raise ValueError(f"{token.text!r} stands where a text or a name is expected")
        if self._peek().text in ("?", "*", "+"):
            times = self._take().text
        elif self._takes("~"):
            low = self._number()
            high = self._number() if self._takes("..") else low
            times = f"{{{low},{high}}}"
        return _Item(atom, times)

    def _number(self) -> str:
        token = self._take()
        if not token.text.isdecimal() or len(token.text) > 4:
            raise ValueError(f"{token.text!r:.60} is no number of repetitions")
        return token.text

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        if self._next == len(self._tokens):
            raise ValueError("it ends within a rule")
        self._next += 1
        return self._tokens[self._next - 1]

    def _takes(self, text: str) -> bool:
        is_next = self._next < len(self._tokens) and self._peek().text == text
        self._next += is_next
        return is_next


@dataclass(eq=False)
class _Writer:
    """Writes rules as expressions, each with those that it names."""

    rules: Mapping[str, _Choices | str]
    ignored: str = ""  # what may follow each text of a rule that is no terminal
    _known: dict[str, str] = field(default_factory=dict[str, str])
    _open: list[str] = field(default_factory=list[str])

    def named(self, name: str, depth: int) -> str:
        """The expression of a rule or terminal."""
        if name in self._open:
            raise NotRegular(f"its rule {name!r} contains itself")
        if name not in self.rules:
            raise ValueError(f"it has no rule {name[:60]!r}")
        if name not in self._known:
            rule = self.rules[name]
            self._open.append(name)
            is_rule = not name.isupper()
            choices = [rule] if isinstance(rule, str) else self.alternatives(rule, is_rule, depth)
            self._known[name] = f"(?:{'|'.join(choices)})"
            self._open.pop()
        return self._known[name]

    def alternatives(self, choices: _Choices, is_rule: bool, depth: int) -> list[str]:
        """The expressions of alternatives."""
        if depth > MAX_DEPTH:
            raise NotRegular("its rules are nested too deeply")
        written: list[str] = []
        size = 0
        for choice in choices:
            parts: list[str] = []
            for item in choice:
                parts.append(self._item(item, is_rule, depth + 1))
                size += len(parts[-1])
                if size > MAX_REGEX_BYTES:
                    raise NotRegular("it is too large as a regular expression")
            written.append("".join(parts))
        return written

    def _item(self, item: _Item, is_rule: bool, depth: int) -> str:
        atom = item.atom
        if isinstance(atom, list):
            written = f"(?:{'|'.join(self.alternatives(atom, is_rule, depth))})"
        elif isinstance(atom, _Token) and atom.kind == "name":
            written = self.named(atom.text, depth)
            if is_rule and atom.text.isupper() and self.ignored:
                written = f"(?:{written}{self.ignored})"
        else:
            written = f"(?:{_text(atom)}{self.ignored if is_rule else ''})"
        return written + item.times


def _text(atom: _Token | tuple[_Token, _Token]) -> str:
    """The expression of a text, an expression or a range of characters."""
    if not isinstance(atom, _Token):
        low, high = (_literal(one) for one in atom)
        if len(low) != 1 or len(high) != 1 or low > high:
            raise ValueError("a range is not from one character to a later one")
        return f"[\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}]"
    if atom.kind == "string":
        text = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", _literal(atom))
        return f"(?i:{text})" if atom.text.endswith("i") else text
    body, _, flags = atom.text[1:].rpartition("/")
    body, kept = body.replace(r"\/", "/"), "".join(sorted({*flags} & {*"imsx"}))
    return f"(?{kept}:{body})" if kept else body


def _literal(token: _Token) -> str:
    if token.kind != "string":
        raise ValueError(f"{token.text!r:.60} stands where a text is expected")
    try:
        return ast.literal_eval(token.text.removesuffix("i"))
    except (ValueError, SyntaxError):
        raise ValueError(f"{token.text!r:.60} has an unknown escape") from None
